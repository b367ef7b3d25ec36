import math
from typing import get_args

import numpy as np
import pytest
import torch

from headrace.configlosses import (
    CISPO,
    GRPO,
    DecoupledPPO,
    IcePop,
    Loss,
    Reinforce,
    TruncatedIS,
)
from headrace.learner.losses import TokenBatch, evaluate

CONFIGS: list[Loss] = [
    TruncatedIS(cap=1.5),
    DecoupledPPO(clip=0.2, cap=1.4),
    GRPO(clip_low=0.1, clip_high=0.3),
    IcePop(low=0.8, high=1.5),
    CISPO(clip_low=0.2, clip_high=0.4),
    Reinforce(),
]


def tokens_of(pi, mu, prox, advantage, weight=None) -> TokenBatch:
    def tensor(values):
        return torch.tensor(values, dtype=torch.float32)

    weight = [1.0] * len(pi) if weight is None else weight
    return TokenBatch(
        logprob=tensor(pi).requires_grad_(),
        behaviour=tensor(mu),
        proximal=tensor(prox),
        advantage=tensor(advantage),
        weight=tensor(weight),
        sample=torch.zeros(len(pi), dtype=torch.int64),
    )


def reference(config: Loss, pi: float, mu: float, prox: float, a: float) -> tuple[float, float]:
    """Loss of one token and its derivative by pi, from the formulas, in float64."""
    rho = math.exp(pi - mu)
    if isinstance(config, TruncatedIS):
        weight = min(rho, config.cap)
        return -weight * a * pi, -weight * a
    if isinstance(config, Reinforce):
        return -a * pi, -a
    if isinstance(config, IcePop):
        weight = rho if config.low <= rho <= config.high else 0.0
        return -weight * a * pi, -weight * a
    if isinstance(config, CISPO):
        weight = min(max(rho, 1 - config.clip_low), 1 + config.clip_high)
        return -weight * a * pi, -weight * a
    if isinstance(config, DecoupledPPO):
        r, factor = math.exp(pi - prox), min(math.exp(prox - mu), config.cap)
        low, high = 1 - config.clip, 1 + config.clip
    else:
        r, factor = rho, 1.0
        low, high = 1 - config.clip_low, 1 + config.clip_high
    inside = min(max(r, low), high)
    if a * r <= a * inside:
        return -factor * a * r, -factor * a * r
    return -factor * a * inside, 0.0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_values_and_gradients_equal_the_float64_reference(config: Loss):
    rng = np.random.default_rng(0)
    pi = -5 * rng.random(400)
    mu = pi + rng.normal(0, 0.4, 400)
    prox = pi + rng.normal(0, 0.3, 400)
    advantage = rng.normal(0, 1, 400)
    weight = rng.random(400)
    tokens = tokens_of(pi, mu, prox, advantage, weight)
    terms = evaluate(config, tokens)
    terms.total.backward()
    narrow = [np.float32(x).astype(np.float64) for x in (pi, mu, prox, advantage)]
    rows = [reference(config, *row) for row in zip(*narrow, strict=True)]
    wide = np.float32(weight).astype(np.float64)
    values, slopes = np.array(rows).T * wide
    assert float(terms.total.detach()) == pytest.approx(values.sum(), rel=1e-5, abs=1e-4)
    assert tokens.logprob.grad is not None
    np.testing.assert_allclose(tokens.logprob.grad.numpy(), slopes, rtol=2e-6, atol=1e-6)
    bounded = float(terms.truncated.float().mean())
    assert bounded == 0 if isinstance(config, Reinforce) else 0.05 < bounded < 0.95


def test_truncated_is_caps_the_ratio_from_above_only():
    mu = [-1.0, -1.0, -1.0]
    pi = [-1.0 + math.log(3.0), -1.0 + math.log(2.0) - 1e-3, -1.0 + math.log(0.01)]
    tokens = tokens_of(pi, mu, pi, [1.0, 1.0, -1.0])
    terms = evaluate(TruncatedIS(cap=2.0), tokens)
    terms.total.backward()
    assert tokens.logprob.grad is not None
    np.testing.assert_allclose(tokens.logprob.grad, [-2.0, -1.998, 0.01], rtol=1e-4)
    assert terms.truncated.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.25, 1.0, 0.0),  # above the range, already good enough
        (1.19, 1.0, -1.19),
        (0.75, 1.0, -0.75),  # below the range, a good token is still pulled up
        (0.75, -1.0, 0.0),  # below the range, already bad enough
        (0.81, -1.0, 0.81),
        (1.25, -1.0, 1.25),  # above the range, a bad token is still pushed down
    ],
)
def test_the_clip_takes_the_gradient_only_where_the_update_went_far_enough(
    ratio: float, advantage: float, slope: float
):
    pi = [-1.0 + math.log(ratio)]
    for config, mu, prox in (
        (GRPO(clip_low=0.2, clip_high=0.2), [-1.0], pi),
        (DecoupledPPO(clip=0.2, cap=5.0), [-1.0], [-1.0]),
    ):
        tokens = tokens_of(pi, mu, prox, [advantage])
        terms = evaluate(config, tokens)
        terms.total.backward()
        assert tokens.logprob.grad is not None
        assert tokens.logprob.grad.item() == pytest.approx(slope, rel=1e-5)
        assert terms.truncated.item() is (slope == 0.0)


def test_decoupled_ppo_weighs_by_the_capped_behaviour_ratio():
    prox = [-1.0, -1.0]
    tokens = tokens_of(prox, [-1.0 - math.log(2.0), -1.0 - math.log(9.0)], prox, [1.0, 1.0])
    terms = evaluate(DecoupledPPO(clip=0.2, cap=5.0), tokens)
    terms.total.backward()
    assert tokens.logprob.grad is not None
    np.testing.assert_allclose(tokens.logprob.grad, [-2.0, -5.0], rtol=1e-5)
    assert terms.truncated.tolist() == [False, True]


def test_icepop_drops_tokens_outside_the_band_and_cispo_only_clips_their_weight():
    pi = [-1.0 + math.log(r) for r in (0.4, 0.6, 4.0, 6.0)]
    for config, slopes, truncated in (
        (IcePop(low=0.5, high=5.0), [0.0, -0.6, -4.0, 0.0], [True, False, False, True]),
        (CISPO(clip_low=0.5, clip_high=4.0), [-0.5, -0.6, -4.0, -5.0], [True, False, False, True]),
    ):
        tokens = tokens_of(pi, [-1.0] * 4, pi, [1.0] * 4)
        terms = evaluate(config, tokens)
        terms.total.backward()
        assert tokens.logprob.grad is not None
        np.testing.assert_allclose(tokens.logprob.grad, slopes, rtol=1e-5)
        assert terms.truncated.tolist() == truncated


def test_every_configured_loss_is_implemented():
    assert {type(config) for config in CONFIGS} == set(get_args(Loss))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_on_policy_every_loss_is_the_plain_policy_gradient(config: Loss):
    pi = [-0.5, -2.0, -7.0]
    advantage = [1.0, -0.5, 0.25]
    tokens = tokens_of(pi, pi, pi, advantage)
    evaluate(config, tokens).total.backward()
    assert tokens.logprob.grad is not None
    np.testing.assert_allclose(tokens.logprob.grad, [-a for a in advantage], rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_no_log_ratio_makes_a_loss_infinite(config: Loss):
    tokens = tokens_of([-1e-3, -200.0], [-200.0, -1e-3], [-1e-3, -200.0], [-1.0, 1.0])
    terms = evaluate(config, tokens)
    terms.total.backward()
    assert math.isfinite(float(terms.total.detach()))
    assert tokens.logprob.grad is not None
    assert bool(torch.isfinite(tokens.logprob.grad).all())
