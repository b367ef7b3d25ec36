"""The numbers of a run's page, against ones counted by hand."""

import pytest

from headrace.broker.records import Array, Failed, Span, Step, Trajectory, Verdict
from headrace.monitor.progress import wilson
from headrace.report import figures
from headrace.report.charts import Axis, bars, lines, shown
from headrace.report.figures import Ends, Point, Series
from headrace.report.samples import Filter, History, Row


def row(seq, *, domain="d", purpose="train", versions=(0, 0), score=1.0, side="", kind="", **more):
    known = {
        "group": seq, "index": 0, "level": 0, "task": 0, "issued_version": versions[0] if versions
        else 0, "turns": 1, "tokens": 10, "sampled": 4, "surprisal": 2.0,
    }  # fmt: skip
    return Row(
        seq=seq, domain=domain, purpose=purpose, versions=versions, score=score,
        success=score == 1.0, side=side, kind=kind, **(known | more),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fate", "step", "told", "cell"),
    [
        ("trained", 3, "trained by step 3", "3"),
        ("filtered", None, "filtered", "filtered"),
        ("probe", None, "never trained", "-"),
        ("open", None, "not trained yet", "-"),
    ],
)
def test_what_became_of_a_sample_is_told_the_same_everywhere(fate, step, told, cell):
    sample = row(1, fate=fate, step=step)
    assert (sample.fate_told, sample.fate_cell) == (told, cell)


def failed(seq):
    return row(seq, versions=(), score=None, side="environment", kind="no_actor")


def trajectory(group):
    return Trajectory(
        group=group, index=0, attempt=1, actor="a", lineage=1, tokens=Array.of("int32", [1, 2]),
        roles=[Span(0, 0, 1), Span(1, 1, 2)], versions=[Span(0, 1, 2)],
        logprobs=Array.of("float32", [-1.0]), temperature=1.0,
        verdict=Verdict(score=1.0, success=True, step_scores=[1.0], checks=[]), turns=[],
        executions=[], queue_s=0.0, wall_s=0.0,
    )  # fmt: skip


def test_success_counts_judged_training_samples_by_the_newest_version_that_sampled_them():
    rows = [
        row(1), row(2, score=0.0), row(3, score=0.5), row(4, versions=(0, 1)), failed(5),
        row(6, purpose="probe", score=0.0), row(7, domain="e", versions=(1, 1), score=0.0),
    ]  # fmt: skip
    assert figures.success_by_version(rows, 1) == [
        Series("d", [Point(0, 1 / 3, *wilson(1, 3)), Point(1, 1.0, *wilson(1, 1))]),
        Series("e", [Point(1, 0.0, *wilson(0, 1))]),
    ]
    assert figures.score_by_version(rows, 1)[0].points == [Point(0, 0.5), Point(1, 1.0)]


def test_samples_of_one_group_are_alike_and_do_not_narrow_the_interval():
    alike = [row(seq, group=seq // 8, score=float(seq // 8 % 2)) for seq in range(32)]
    assert figures.success_by_version(alike, 1) == [
        Series("d", [Point(0, 0.5, *wilson(2, 4))]),
    ]


def test_surprisal_is_a_mean_over_tokens_and_not_over_samples():
    rows = [row(1, sampled=1, surprisal=4.0), row(2, sampled=3, surprisal=0.0)]
    assert figures.surprisal_by_version(rows, 1)[0].points == [Point(0, 1.0)]


def test_neighbouring_versions_share_a_point_in_long_runs_and_all_curves_have_it_at_one_place():
    assert figures.bucket_width(60) == 1
    assert figures.bucket_width(61) == 2
    rows = [row(version, versions=(version, version)) for version in (0, 1, 2)]
    metrics = [{"step": float(step), "kl": float(step)} for step in range(1, 62)]
    assert [p.x for p in figures.success_by_version(rows, 2)[0].points] == [0.5, 2.5]
    kl = figures.metric(metrics, "kl", "kl").points
    assert (kl[0], kl[1]) == (Point(0.5, 1.0), Point(2.5, 2.5))


def test_a_metric_that_a_step_lacks_or_that_is_not_a_number_leaves_a_gap():
    metrics: list[dict[str, float | None]]
    metrics = [{"step": 1.0, "kl": 0.5}, {"step": 2.0, "kl": None}, {"step": 3.0}]
    assert figures.metric(metrics, "kl", "kl").points == [Point(1, 0.5)]


def test_lags_are_weighted_by_tokens():
    metrics = [{"step": 1.0, "lag0/tokens": 30.0, "lag2/tokens": 10.0, "lag2/kl": 9.0}]
    assert figures.mean_lag(metrics).points == [Point(1, 0.5)]
    assert figures.most_lag(metrics).points == [Point(1, 2)]
    assert figures.lag_shares(metrics) == {0: 0.75, 2: 0.25}


def test_throughput_is_tokens_between_two_steps_over_the_time_between_them():
    def step(version):
        return Step(version=version, lineage=1, trained=[], filtered=[], failed=[], position=0,
                    weights_hash="", metrics={})  # fmt: skip

    rows = [row(1), row(2), row(5), row(6, purpose="probe"), row(9)]
    history = History(rows=rows, steps=[(4, step(1)), (8, step(2))])
    metrics = [
        {"step": 1.0, "time": 100.0, "tokens": 50.0},
        {"step": 2.0, "time": 102.0, "tokens": 30.0},
    ]
    generated, trained = figures.throughput(metrics, history)
    assert generated.points == [Point(2, 4.0)], "8 tokens in 2 s; the first step has no beginning"
    assert trained.points == [Point(2, 15.0)]


def test_held_out_rates_count_judged_probes_by_the_version_that_was_probed():
    rows = [
        row(1, purpose="probe"), row(2, purpose="probe", score=0.0), row(3),
        row(4, purpose="probe", versions=(), score=None, issued_version=0),
        row(5, purpose="probe", versions=(9, 9)),
    ]  # fmt: skip
    rates = figures.probe_rates(rows)["d"]
    assert {version: (r.ok, r.n) for version, r in rates.items()} == {0: (1, 2), 9: (1, 1)}


def test_failures_are_counted_by_side_class_and_domain():
    wrong = {"score": 0.0, "side": "model", "kind": "wrong"}
    rows = [failed(1), row(2, **wrong), row(3, domain="e", **wrong), row(4)]
    rows += [row(5, purpose="probe", **wrong)]
    assert [(c.side, c.kind, c.by_domain, c.total) for c in figures.failure_classes(rows)] == [
        ("environment", "no_actor", {"d": 1}, 1),
        ("model", "wrong", {"d": 1, "e": 1}, 2),
    ]


def test_the_first_and_the_last_samples_are_kept_once_each():
    ends = Ends(2)
    for seq in range(1, 4):
        ends.offer(row(seq), trajectory(seq))
    ends.offer(row(4, score=0.0, side="model", kind="wrong"), trajectory(4))
    nothing = Failed(group=5, index=0, attempt=1, actor="", lineage=1, side="environment",
                     kind="no_actor", evidence="")  # fmt: skip
    ends.offer(failed(5), nothing)
    ends.offer(row(6, purpose="probe"), trajectory(6))
    kept = [(part.title, [r.seq for r, _ in part.samples]) for part in ends.picked()]
    assert kept == [("early successes", [1, 2]), ("late successes", [3]), ("early failures", [4])]


def test_a_filter_takes_a_version_inside_the_span_and_no_score_from_a_failed_sample():
    assert Filter(version=2).matches(row(1, versions=(1, 3)))
    assert not Filter(version=0).matches(row(1, versions=(1, 3)))
    assert not Filter(version=0).matches(failed(1))
    assert not Filter(min_score=0.0).matches(failed(1))
    assert not Filter(max_score=1.0).matches(failed(1))
    assert Filter(min_score=0.5, max_score=0.5).matches(row(1, score=0.5))
    assert Filter().matches(failed(1))


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 10.0], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
        ([0.013, 0.04], [0.01, 0.02, 0.03, 0.04]),
        ([-3.0, 900.0], [-200.0, 0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]),
        ([5.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
    ],
)
def test_ticks_are_round_and_hold_all_values(values, ticks):
    axis = Axis.over(values)
    assert axis.ticks == pytest.approx(ticks)
    assert axis.low <= min(values) <= max(values) <= axis.high


def test_names_in_charts_are_escaped():
    name = "<script>&"
    drawn = lines([Series(name, [Point(1, 1.0), Point(2, 3.0)])], x=name, last=2) + bars(
        {0: 1.0}, x=name
    )
    assert "<script>" not in drawn
    assert "&lt;script&gt;&amp;" in drawn


def test_a_chart_without_points_is_empty():
    assert lines([Series("a", [])], x="step", last=3) == ""
    assert bars({}, x="lag") == ""


def test_numbers_are_shown_with_three_digits():
    assert [shown(x) for x in (0.01234, 1.0, 99.96, 12345.6)] == ["0.0123", "1", "100", "12,346"]
    assert [shown(x, "%") for x in (0.456, 0.09, 0.0042, 0.0)] == ["46 %", "9 %", "0.42 %", "0 %"]


@pytest.mark.parametrize(
    ("failing", "right"),
    [([8] * 10, [1] * 3), ([8] * 6, [1] * 6)],  # groups of which a version sampled 8 or 1
)
def test_a_point_lies_in_its_interval_where_groups_differ_in_size(failing, right):
    rows: list[Row] = []
    for group, (size, score) in enumerate(
        [(size, 0.0) for size in failing] + [(size, 1.0) for size in right]
    ):
        rows += [row(len(rows) + index, group=group, score=score) for index in range(size)]
    ((point,),) = (series.points for series in figures.success_by_version(rows, 1))
    assert point.y == pytest.approx(len(right) / (len(failing) + len(right)))
    assert point.low is not None
    assert point.high is not None
    assert point.low < point.y < point.high
