"""What a run says about itself: progress, summary, logs, metrics, and how they are shown."""

import asyncio
import io
import json
import logging
import math
from fractions import Fraction

import pytest
from rich.console import Console

from headrace.errors import ConfigError, RecordError
from headrace.monitor.display import (
    LineDisplay,
    TableDisplay,
    TimeLeft,
    closing,
    duration,
    one_line,
    rate,
    shares,
)
from headrace.monitor.logs import CONTEXT, about, setup_logging
from headrace.monitor.metrics import MetricsWriter, read_rows
from headrace.monitor.progress import (
    ActorView,
    Failures,
    Progress,
    Rate,
    Success,
    Summary,
    difference,
    read_progress,
    read_summary,
    wilson,
    write_progress,
    write_summary,
)

PROGRESS = Progress(
    version=3,
    steps=3,
    total_steps=10,
    issued=31,
    complete=28,
    trained=24,
    filtered=2,
    failed=Failures(environment=1, model=4),
    phase="training",
    success={"arithmetic": Success(n=200, ok=90, ema=0.47)},
    generated_tokens_per_s=210.4,
    trained_tokens_per_s=95.0,
    staleness={0: 60, 1: 40},
    waiting={"samples": 12.0},
    actors=[ActorView(id="a1", version=3, status="sampling")],
)
SUMMARY = Summary(
    run="first",
    version=10,
    steps=10,
    before={"arithmetic": Rate(n=50, ok=15)},
    after={"arithmetic": Rate(n=50, ok=30)},
    trained=80,
    filtered=7,
    failed=Failures(environment=1, model=9),
    staleness={0: 1, 1: 3},
    time_s={"step": 300.0, "samples": 100.0},
    wall_s=424.0,
    generated_tokens=9000,
    trained_tokens=8000,
    checkpoint="runs/first/checkpoints/10",
)


class TurnedClock:
    """A clock that moves when told."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def quiet_logging():
    """Leave the root logger as it was."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.getLogger("headrace").setLevel(logging.NOTSET)


def test_progress_and_summary_read_back_as_they_were_written(tmp_path):
    assert read_progress(tmp_path) is None
    assert read_summary(tmp_path) is None
    write_progress(tmp_path, PROGRESS)
    write_summary(tmp_path, SUMMARY)
    assert read_progress(tmp_path) == PROGRESS
    assert read_summary(tmp_path) == SUMMARY
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress.json", "summary.json"]


def test_a_file_that_holds_no_progress_is_refused_with_its_path(tmp_path):
    (tmp_path / "progress.json").write_text('{"version": "three"}')
    with pytest.raises(RecordError, match=r"progress\.json: not a progress"):
        read_progress(tmp_path)


def test_a_phase_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="phase must be one of"):
        Progress(phase="lunch")


@pytest.mark.parametrize(("ok", "n"), [(0, 10), (1, 10), (5, 10), (30, 50), (50, 50)])
def test_the_wilson_interval_holds_the_proportions_that_the_score_test_accepts(ok, n):
    # the bounds solve |p - p0| = z sqrt(p0 (1 - p0) / n), the definition by the score test
    z = 1.959964
    for bound in wilson(ok, n):
        squared = (ok / n - bound) ** 2
        assert math.isclose(squared, z * z * bound * (1 - bound) / n, abs_tol=1e-9)


def test_the_interval_of_a_difference_is_the_published_one():
    """Newcombe 1998, table II, method 10: 56/70 - 48/80 gives 0.0524 to 0.3339."""
    low, high = difference(Rate(n=80, ok=48), Rate(n=70, ok=56))
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_the_wilson_interval_of_five_in_ten_is_the_published_one():
    low, high = wilson(5, 10)
    assert (round(low, 3), round(high, 3)) == (0.237, 0.763)
    assert wilson(0, 0) == (0.0, 1.0)
    assert Fraction(Rate(n=4, ok=1).mean) == Fraction(1, 4)


def test_a_log_line_carries_who_said_it_and_what_it_is_about(tmp_path, quiet_logging):
    stream = io.StringIO()
    setup_logging("actor", "a1", tmp_path, run="first", stream=stream)
    logging.getLogger("headrace.actor").info(
        "sampled %d", 3, extra={"group": 7, "sample": 2, "domain": "parity", "version": 4}
    )
    logging.getLogger("elsewhere").info("noise")
    (line,) = (tmp_path / "logs/actor-a1.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry.pop("time") > 0
    assert entry == {
        "level": "info",
        "role": "actor",
        "id": "a1",
        "run": "first",
        "event": "sampled 3",
        "logger": "headrace.actor",
        "group": 7,
        "sample": 2,
        "domain": "parity",
        "version": 4,
    }
    assert stream.getvalue().endswith("I actor-a1 sampled 3\n")


async def test_context_is_carried_by_all_that_is_logged_within_and_by_nothing_else(
    tmp_path, quiet_logging
):
    setup_logging("actor", "a1", tmp_path, stream=io.StringIO())
    logger = logging.getLogger("headrace.actor")

    async def episode(sample):
        await asyncio.sleep(0)
        logger.info("inner")

    with about(group=7, domain="parity"):
        tasks = []
        for sample in (0, 1):
            with about(sample=sample):
                tasks.append(asyncio.create_task(episode(sample)))
        logger.info("own", extra={"version": 3})
    logger.info("outside")
    await asyncio.gather(*tasks)
    lines = map(json.loads, (tmp_path / "logs/actor-a1.jsonl").read_text().splitlines())
    context = [(e["event"], {k: e[k] for k in CONTEXT if k in e}) for e in lines]
    assert context == [
        ("own", {"group": 7, "domain": "parity", "version": 3}),
        ("outside", {}),
        ("inner", {"group": 7, "sample": 0, "domain": "parity"}),
        ("inner", {"group": 7, "sample": 1, "domain": "parity"}),
    ]


def test_setting_up_again_replaces_the_destinations(tmp_path, quiet_logging):
    first, second = io.StringIO(), io.StringIO()
    setup_logging("actor", "a1", tmp_path, stream=first)
    setup_logging("actor", "a1", tmp_path, stream=second)
    logging.getLogger("headrace").warning("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert len((tmp_path / "logs/actor-a1.jsonl").read_text().splitlines()) == 1


def test_nothing_that_is_logged_acts_on_the_terminal(tmp_path, quiet_logging):
    stream = io.StringIO()
    setup_logging("actor", "a1", tmp_path, stream=stream)
    logging.getLogger("headrace").warning("evidence: %s", "\x1b[2J\r\u202e\nnext")
    assert stream.getvalue().endswith("evidence: \\x1b[2J\\r\\u202e\nnext\n")


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path, quiet_logging):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run\.dir .*/file/run: .*Not a directory"):
        setup_logging("learner", "", tmp_path / "file/run", stream=io.StringIO())


def test_a_traceback_is_part_of_the_json_line(tmp_path, quiet_logging):
    setup_logging("learner", "", tmp_path, stream=io.StringIO())
    try:
        raise ValueError("bug")
    except ValueError:
        logging.getLogger("headrace").exception("failed")
    entry = json.loads((tmp_path / "logs/learner.jsonl").read_text())
    assert "ValueError: bug" in entry["traceback"]


def test_metrics_are_rows_of_the_run_folder(tmp_path):
    metrics = MetricsWriter(tmp_path)
    metrics.write(1, {"loss/mean": 0.25, "kl": math.nan}, at=5.0)
    metrics.write(2, {"loss/mean": 0.125}, at=6.0)
    metrics.close()
    assert read_rows(tmp_path) == [
        {"step": 1.0, "time": 5.0, "loss/mean": 0.25, "kl": None},
        {"step": 2.0, "time": 6.0, "loss/mean": 0.125},
    ]


def test_rows_go_on_after_the_last_whole_one_when_a_kill_cut_a_row(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":7,"time":2.0}\n{"step":8,"ti')
    metrics = MetricsWriter(tmp_path)
    assert metrics.last == 7
    metrics.write(8, {}, at=3.0)
    metrics.close()
    assert read_rows(tmp_path) == [{"step": 7.0, "time": 2.0}, {"step": 8.0, "time": 3.0}]


def test_a_half_written_last_row_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":1,"time":2.0}\n{"step":2,"ti')
    assert read_rows(tmp_path) == [{"step": 1.0, "time": 2.0}]
    assert read_rows(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\0\0", "not a row of numbers"),
        (b'{"step":"a","time":1}', "not a row of numbers"),
        (b'{"step":2}', "has no step and time"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_nothing_is_cut_off(tmp_path, line, said):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"time":2.0}\n' + line + b'\n{"step":3,"ti')
    before = path.read_bytes()
    for reader in (read_rows, MetricsWriter):
        with pytest.raises(RecordError, match=rf"metrics\.jsonl: line 2 .*{said}|line 2 {said}"):
            reader(tmp_path)
    assert path.read_bytes() == before


def test_the_time_left_follows_the_pace_of_the_steps_and_counts_down():
    clock = TurnedClock()
    left = TimeLeft(clock)

    def estimate(steps, phase="training"):
        return left.estimate(Progress(steps=steps, total_steps=5, phase=phase))

    assert estimate(0, "probing") is None
    clock.now += 90.0
    assert estimate(0) is None
    clock.now += 10.0
    assert estimate(1) == 40.0
    clock.now += 4.0
    assert estimate(1) == 36.0
    clock.now += 100.0
    assert estimate(1) == 0.0


def test_plain_lines_come_at_each_step_and_else_every_fifteen_seconds():
    clock, out = TurnedClock(), io.StringIO()
    display = LineDisplay(Console(file=out, width=60), clock)
    states = [("actor-0", "up")]
    for steps, seconds in [(0, 0.0), (0, 5.0), (1, 5.0), (1, 1.0), (1, 15.0)]:
        clock.now += seconds
        display.show(Progress(steps=steps, total_steps=2, phase="training"), states)
    assert len(out.getvalue().splitlines()) == 3


def test_a_plain_line_names_processes_in_trouble():
    out = io.StringIO()
    display = LineDisplay(Console(file=out, width=60), TurnedClock())
    display.show(None, [("actor-0", "restarting"), ("learner-0", "up")])
    assert out.getvalue().endswith("waiting for the learner  actor-0:restarting\n")


def test_one_line_tells_all_that_a_run_is_judged_by():
    line = one_line(PROGRESS, 125.0)
    for part in (
        "version 3",
        "step 3/10",
        "31 issued 28 complete 24 trained 2 filtered",
        "failed 1 environment 4 model",
        "arithmetic 47 % of 200",
        "210 generated 95 trained",
        "lag 0: 60 %  1: 40 %",
        "left 2 min 05 s",
    ):
        assert part in line


def test_the_table_redraws_in_a_terminal_and_leaves_it_clean():
    out = io.StringIO()
    display = TableDisplay(Console(file=out, force_terminal=True, width=100), TurnedClock())
    display.show(PROGRESS, [("actor-0", "up")])
    drawn = out.getvalue()
    display.close()
    assert "31 issued, 28 complete, 24 trained" in drawn
    assert "actor a1" in drawn


def test_the_closing_table_shows_success_with_intervals_cost_and_checkpoint():
    out = io.StringIO()
    Console(file=out, width=100).print(closing(SUMMARY))
    shown = out.getvalue()
    assert "15 of 50, 30 % (19-44 %)" in shown
    assert "30 of 50, 60 % (46-72 %)" in shown
    assert "80 trained, 7 filtered" in shown
    assert "1 environment, 9 model" in shown
    assert "0: 25 %  1: 75 %" in shown
    assert "step: 5 min 00 s  samples: 1 min 40 s" in shown
    assert "runs/first/checkpoints/10" in shown


def test_the_closing_table_without_probes_shows_no_success():
    out = io.StringIO()
    Console(file=out, width=100).print(closing(Summary(run="first", version=1, steps=1)))
    assert "held-out" not in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (42.4, "42 s"),
        (59.7, "1 min 00 s"),
        (185.0, "3 min 05 s"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations_are_written_in_two_units(seconds, text):
    assert duration(seconds) == text


def test_what_was_not_measured_is_a_dash():
    assert rate(None) == rate(Rate()) == shares({}) == "-"
