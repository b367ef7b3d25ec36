"""What one optimizer step reports about the tokens it trained: numbers, deterministic to the bit.

Symbols as in `headrace.learner.losses`: pi is the learner's log-probability, mu the sampler's, and
rho = exp(pi - mu). Every token was sampled from mu, so a mean over tokens estimates an expectation
under the sampler.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.learner.losses import MAX_LOG_RATIO

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """The trained tokens of a batch, `[S]` each.

    Attributes:
        logprob: the learner's log-probability.
        behaviour: the sampler's log-probability.
        entropy: of the learner's distribution, nats.
        truncated: whether the loss truncated, clipped or masked the token's ratio.
        advantage: of the token's turn.
        lag: learner's version minus the version that sampled the token.
    """

    logprob: Float
    behaviour: Float
    entropy: Float
    truncated: npt.NDArray[np.bool_]
    advantage: Float
    lag: npt.NDArray[np.int64]


def summarize(tokens: TokenStatistics) -> dict[str, float]:
    """Metrics over all tokens, and again under `lag<n>/` for the tokens of each lag.

    Keys: `tokens`, `entropy`, `ratio_mean`, `ratio_max`, `truncated_fraction`, `kl` (the k3
    estimate of KL(sampler || learner): mean of rho - 1 - log rho, never negative; Schulman,
    "Approximating KL divergence"), `logprob_diff_mean` and `logprob_diff_max` (absolute, sampler
    against learner), `ess` (effective sample size of rho as a share of the tokens:
    (sum rho)^2 / (n sum rho^2)), `advantage_abs_mean`.
    """
    metrics = _describe(tokens, np.ones(len(tokens.lag), np.bool_))
    for lag in np.unique(tokens.lag):
        chosen = _describe(tokens, tokens.lag == lag)
        metrics |= {f"lag{lag}/{name}": value for name, value in chosen.items()}
    return metrics


def _describe(tokens: TokenStatistics, chosen: npt.NDArray[np.bool_]) -> dict[str, float]:
    difference = tokens.logprob[chosen] - tokens.behaviour[chosen]
    log_ratio = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = np.exp(log_ratio)
    return {
        "tokens": float(len(rho)),
        "entropy": float(tokens.entropy[chosen].mean()),
        "ratio_mean": float(rho.mean()),
        "ratio_max": float(rho.max()),
        "truncated_fraction": float(tokens.truncated[chosen].mean()),
        "kl": float((rho - 1.0 - log_ratio).mean()),
        "logprob_diff_mean": float(np.abs(difference).mean()),
        "logprob_diff_max": float(np.abs(difference).max()),
        "ess": float(rho.sum() ** 2 / (len(rho) * np.square(rho).sum())),
        "advantage_abs_mean": float(np.abs(tokens.advantage[chosen]).mean()),
    }
