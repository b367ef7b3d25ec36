import subprocess
import sys

import numpy as np
import pytest

from headrace.learner.advantages import ESTIMATORS, MIN_STD, advantages, informative


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


def test_the_decision_to_filter_needs_no_torch():
    code = "import sys, headrace.learner.advantages; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
