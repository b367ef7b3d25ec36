"""Policy losses: pure functions over per-token tensors, found by the type of their configuration.

Notation of the formulas, for one sampled token (log-probabilities in nats, all at the sampling
temperature):

    pi    the learner's log-probability, the only value that carries a gradient
    mu    the sampler's log-probability, recorded when the token was sampled (behaviour policy)
    prox  the learner's log-probability at the start of the optimizer step (proximal policy)
    A     advantage
    sg    stop gradient

Every loss is a sum over tokens; the trainer divides by the number of trained tokens of the whole
batch, masked and truncated ones included, so that neither packing nor micro-batches nor a
correction that drops tokens changes the weight of the others.

A batch is one optimizer step, so `prox` equals sg(pi) in every micro-batch and the trainer passes
the detached forward. The functions keep the two apart: their value does not rest on that.

A new loss is a configuration struct in `headrace.configlosses` and a function here with
`@loss(Struct)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from headrace.configlosses import (
    CISPO,
    GRPO,
    DecoupledPPO,
    IcePop,
    Loss,
    Reinforce,
    TruncatedIS,
)

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before the exponential, so that no ratio is infinite."""


@dataclass(frozen=True)
class TokenBatch:
    """What a loss may look at: S sampled tokens of any number of samples.

    Attributes:
        logprob: pi, float32 `[S]`.
        behaviour: mu, float32 `[S]`.
        proximal: prox, float32 `[S]`.
        advantage: A, float32 `[S]`.
        weight: factor of each token's loss, float32 `[S]`; 1 unless something reweights tokens.
        sample: int64 `[S]`, equal for tokens of one sample; for ratios over whole sequences.
    """

    logprob: Tensor
    behaviour: Tensor
    proximal: Tensor
    advantage: Tensor
    weight: Tensor
    sample: Tensor


@dataclass(frozen=True)
class LossTerms:
    """Result of a loss.

    Attributes:
        total: sum over tokens, a float32 scalar.
        truncated: bool `[S]`, tokens whose importance ratio was truncated, clipped or masked.
    """

    total: Tensor
    truncated: Tensor


_Config = TypeVar("_Config", bound=Loss)
_LOSSES: dict[type, Callable[..., LossTerms]] = {}


def loss(
    config: type[_Config],
) -> Callable[
    [Callable[[_Config, TokenBatch], LossTerms]], Callable[[_Config, TokenBatch], LossTerms]
]:
    """Register a loss for a type of configuration."""

    def register(
        function: Callable[[_Config, TokenBatch], LossTerms],
    ) -> Callable[[_Config, TokenBatch], LossTerms]:
        _LOSSES[config] = function
        return function

    return register


def evaluate(config: Loss, tokens: TokenBatch) -> LossTerms:
    """Sum of the configured loss over the tokens."""
    return _LOSSES[type(config)](config, tokens)


def ratio(new: Tensor, old: Tensor) -> Tensor:
    """exp(new - old) with the exponent clamped to +- `MAX_LOG_RATIO`; shape and dtype are kept."""
    return torch.exp((new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


@loss(TruncatedIS)
def truncated_is(config: TruncatedIS, tokens: TokenBatch) -> LossTerms:
    """L = -sum sg(min(rho, cap)) * A * pi, with rho = exp(pi - mu).

    A policy gradient whose off-policy correction is bounded above: its variance is, its bias is
    towards the sampler. No token's gradient is ever zeroed.

    Source: IMPALA (V-trace's rho-bar), arXiv 1802.01561; for language models LlamaRL (AIPO),
    arXiv 2505.24034.
    """
    rho = ratio(tokens.logprob, tokens.behaviour).detach()
    weight = rho.clamp(max=config.cap) * tokens.advantage * tokens.weight
    return LossTerms(-(weight * tokens.logprob).sum(), rho > config.cap)


@loss(DecoupledPPO)
def decoupled_ppo(config: DecoupledPPO, tokens: TokenBatch) -> LossTerms:
    """L = sum min(w, cap) * max(-A r, -A clip(r, 1 - clip, 1 + clip)).

    r = exp(pi - prox) bounds the size of the update; w = sg(exp(prox - mu)) corrects for where the
    tokens came from. With one optimizer step a batch r is 1, and all control lies in w.

    Source: "Batch size-invariance for policy optimization", arXiv 2110.00641; AReaL,
    arXiv 2505.24298.
    """
    behaviour_weight = ratio(tokens.proximal, tokens.behaviour).detach()
    update = ratio(tokens.logprob, tokens.proximal.detach())
    surrogate, clipped = _clipped(update, tokens.advantage, config.clip, config.clip)
    weight = behaviour_weight.clamp(max=config.cap) * tokens.weight
    return LossTerms((weight * surrogate).sum(), clipped | (behaviour_weight > config.cap))


@loss(GRPO)
def grpo(config: GRPO, tokens: TokenBatch) -> LossTerms:
    """L = sum max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), with rho = exp(pi - mu).

    PPO's surrogate with the sampler as the old policy: staleness and the difference between the
    two engines share one clip range. Normalised by tokens, without a reference model.

    Source: PPO, arXiv 1707.06347; DeepSeekMath, arXiv 2402.03300; separate clip ranges and token
    normalisation from DAPO, arXiv 2503.14476.
    """
    rho = ratio(tokens.logprob, tokens.behaviour)
    surrogate, clipped = _clipped(rho, tokens.advantage, config.clip_low, config.clip_high)
    return LossTerms((tokens.weight * surrogate).sum(), clipped)


@loss(IcePop)
def icepop(config: IcePop, tokens: TokenBatch) -> LossTerms:
    """L = -sum [low <= rho <= high] * sg(rho) * A * pi, with rho = exp(pi - mu).

    Tokens outside the band get no gradient: there the difference between the two engines says more
    than the advantage. They still count in the normalisation.

    Source: "Every Step Evolves" (Ring-1T, IcePop), arXiv 2510.18855, whose band is on the engines'
    mismatch at the start of the step; with one step a batch that is this rho.
    """
    rho = ratio(tokens.logprob, tokens.behaviour).detach()
    dropped = (rho < config.low) | (rho > config.high)
    weight = rho.masked_fill(dropped, 0.0) * tokens.advantage * tokens.weight
    return LossTerms(-(weight * tokens.logprob).sum(), dropped)


@loss(CISPO)
def cispo(config: CISPO, tokens: TokenBatch) -> LossTerms:
    """L = -sum sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * pi, with rho = exp(pi - mu).

    The weight is clipped and not the update: every token keeps a gradient, rare ones included.

    Source: MiniMax-M1, arXiv 2506.13585.
    """
    rho = ratio(tokens.logprob, tokens.behaviour).detach()
    clipped = rho.clamp(1 - config.clip_low, 1 + config.clip_high)
    weight = clipped * tokens.advantage * tokens.weight
    return LossTerms(-(weight * tokens.logprob).sum(), clipped != rho)


@loss(Reinforce)
def reinforce(config: Reinforce, tokens: TokenBatch) -> LossTerms:
    """L = -sum A * pi: the on-policy gradient, whoever sampled the tokens.

    Biased as soon as the sampler's weights or kernels differ from the learner's; it shows what the
    corrections are for.

    Source: REINFORCE, Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    total = -(tokens.advantage * tokens.weight * tokens.logprob).sum()
    return LossTerms(total, torch.zeros_like(tokens.logprob, dtype=torch.bool))


def _clipped(rho: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate as a loss, and where the clip took the gradient away."""
    free = -advantage * rho
    bounded = -advantage * rho.clamp(1 - low, 1 + high)
    return torch.maximum(free, bounded), (bounded > free).detach()
