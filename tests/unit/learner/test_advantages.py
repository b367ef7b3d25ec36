import random
import subprocess
import sys

import numpy as np
import pytest

from headrace.learner.advantages import (
    ESTIMATORS,
    MIN_STD,
    advantages,
    informative,
    turn_advantages,
)


def test_a_group_is_informative_when_its_scores_spread():
    assert informative([0.0, 1.0, 0.0])
    assert not informative([1.0, 1.0, 1.0])
    assert not informative([0.5])
    assert not informative([])


def test_float32_residue_is_no_spread():
    residue = [float(np.float32(0.1) + np.float32(0.2)), 0.3, float(np.float32(0.3))]
    assert len(set(residue)) > 1
    assert not informative(residue)
    assert advantages("group_std", residue) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", sorted(ESTIMATORS))
def test_advantages_of_a_group_sum_to_zero(kind: str):
    scores = [0.1, 0.9, 0.4, 0.4, 1.0]
    assert sum(advantages(kind, scores)) == pytest.approx(0.0, abs=1e-12)


def test_group_std_is_the_z_score():
    scores = [0.35] * 7 + [0.95]
    expected = (np.array(scores) - np.mean(scores)) / np.std(scores)
    np.testing.assert_allclose(advantages("group_std", scores), expected, rtol=1e-12)


def test_group_mean_only_centres():
    assert advantages("group_mean", [0.0, 0.0, 1.0, 1.0]) == [-0.5, -0.5, 0.5, 0.5]


def test_leave_one_out_subtracts_the_mean_of_the_others():
    scores = [0.2, 0.7, 0.9]
    expected = [0.2 - 0.8, 0.7 - 0.55, 0.9 - 0.45]
    np.testing.assert_allclose(advantages("leave_one_out", scores), expected, rtol=1e-12)


def test_a_tiny_spread_is_not_blown_up():
    scores = [0.5, 0.5 + 2e-6]
    assert informative(scores)
    assert max(map(abs, advantages("group_std", scores))) == pytest.approx(1e-6 / MIN_STD)


STEPS = [[0.3, 0.0, 1.0], [0.0, 0.4], [0.3, 0.3, 0.0], [0.5]]
SCORES = [1.0, 0.4, 0.0, 0.5]


def test_without_step_weight_every_turn_has_the_advantage_of_the_outcome():
    outcome = advantages("group_std", SCORES)
    expected = [[value] * len(steps) for value, steps in zip(outcome, STEPS, strict=True)]
    assert turn_advantages("group_std", SCORES, STEPS, 0.0) == expected


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_a_turn_is_compared_with_the_returns_of_the_same_turn_of_the_group(weight: float):
    outcome = np.array(SCORES) - np.mean(SCORES)
    first = np.array([1.3, 0.4, 0.6, 0.5])
    second = np.array([1.0, 0.4, 0.3])
    third = np.array([1.0, 0.0])
    centred = [returns - returns.mean() for returns in (first, second, third)]
    expected = [
        [centred[0][0], centred[1][0], centred[2][0]],
        [centred[0][1], centred[1][1]],
        [centred[0][2], centred[1][2], centred[2][1]],
        [centred[0][3]],
    ]
    found = turn_advantages("group_mean", SCORES, STEPS, weight)
    for sample, turns in enumerate(expected):
        want = (1 - weight) * outcome[sample] + weight * np.array(turns)
        np.testing.assert_allclose(found[sample], want, atol=1e-12)


def test_a_turn_that_one_sample_alone_has_is_judged_by_its_outcome():
    found = turn_advantages("group_mean", [0.0, 1.0], [[0.0, 0.0], [1.0]], 0.5)
    assert found[0][1] == 0.5 * -0.5


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_control_permutes_the_advantages_of_each_turn(weight: float):
    real = turn_advantages("group_mean", SCORES, STEPS, weight)
    orders = set()
    for seed in range(20):
        control = turn_advantages("group_mean", SCORES, STEPS, weight, shuffle=random.Random(seed))
        for turn in range(3):
            mine, theirs = ([v[turn] for v in x if len(v) > turn] for x in (control, real))
            if weight == 1 or turn == 0:
                np.testing.assert_allclose(sorted(mine), sorted(theirs), atol=1e-12)
        orders.add(tuple(values[0] for values in control))
        again = turn_advantages("group_mean", SCORES, STEPS, weight, shuffle=random.Random(seed))
        assert again == control
    assert len(orders) > 10


def test_the_decision_to_filter_needs_no_torch():
    code = "import sys, headrace.learner.advantages; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
