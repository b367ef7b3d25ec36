"""pass@k, its interval and the report, against enumeration and simulation."""

import itertools
import math
import random
from typing import Any

import pytest

from headrace.actor.passrates import Sample, interval, pass_at_k, report, reports
from headrace.monitor.progress import wilson


def sample(index: int, number: int, success: bool, **more: Any) -> Sample:
    base: dict[str, Any] = {"domain": "d", "level": 0, "split": "heldout", "attempts": 1}
    base["turns"] = ["x"]
    return Sample(index=index, number=number, success=success, **(base | more))


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_stays_exact_where_the_binomials_exceed_floats():
    # 1 - product of (n - c - i) / (n - i)
    n, c, k = 5000, 3, 2000
    expected = 1 - math.prod((n - c - i) / (n - i) for i in range(k))
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1)])
def test_pass_at_k_refuses_more_samples_than_there_are(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("right", range(11))
def test_with_one_sample_a_task_the_interval_is_wilsons(right):
    values = [1.0] * right + [0.0] * (10 - right)
    assert interval(values, 1) == pytest.approx(wilson(right, 10))


def test_alike_samples_of_a_task_narrow_nothing_and_unlike_ones_count_in_full():
    alike = [1.0] * 5 + [0.0] * 5
    assert interval(alike, 8) == pytest.approx(wilson(5, 10))
    assert interval([0.5] * 10, 8) == pytest.approx(wilson(40, 80))


def test_the_interval_holds_the_true_rate_in_about_95_of_100_evaluations():
    rng = random.Random(0)
    held = runs = 0
    # tasks differ much: Beta(1/2, 1) has mean 1/3
    for _ in range(1000):
        rates = [rng.betavariate(0.5, 1.0) for _ in range(30)]
        values = [sum(rng.random() < rate for _ in range(4)) / 4 for rate in rates]
        low, high = interval(values, 4)
        held += low <= 1 / 3 <= high
        runs += 1
    assert 0.93 <= held / runs <= 0.98


def test_samples_that_were_not_judged_enter_no_rate_and_are_reported_apart():
    samples = [
        sample(0, 0, True),
        sample(0, 1, False, side="model", kind="assertion"),
        sample(1, 0, False),
        sample(1, 1, False, side="environment", kind="sandbox_error", attempts=3),
        sample(2, 0, True, attempts=2),
        sample(2, 1, True),
    ]
    made = report(samples, [1, 2])
    assert (made.tasks, made.judged, made.unjudged, made.retried) == (3, 5, 1, 1)
    first, second = made.pass_at
    assert first.mean == pytest.approx((0.5 + 0 + 1) / 3)
    # task 1 has one judged sample: pass@2 cannot be known of it
    assert second.mean == pytest.approx(1.0)
    assert made.model_failures == {"assertion": 1, "wrong": 1}
    assert made.environment_failures == {"sandbox_error": 1}


def test_success_by_turn_counts_samples_that_needed_at_most_so_many():
    samples = [
        sample(0, 0, True, turns=["a"], max_turns=2),
        sample(1, 0, True, turns=["a", "b"], max_turns=2),
        sample(2, 0, False, turns=["a", "b"], max_turns=2),
        sample(3, 0, True, turns=["a", "b"], max_turns=2),
    ]
    assert report(samples, [1]).success_by_turn == [0.25, 0.75]


def test_a_domain_without_a_judged_sample_claims_no_rate():
    made = report([sample(0, 0, False, side="environment", kind="scorer_error")], [1])
    assert made.pass_at == []
    assert made.judged == 0


def test_each_domain_and_level_has_a_report_of_its_own():
    samples = [sample(0, 0, True), sample(0, 0, False, level=1), sample(0, 0, True, domain="a")]
    assert [(r.domain, r.level) for r in reports(samples, [1])] == [("a", 0), ("d", 0), ("d", 1)]
