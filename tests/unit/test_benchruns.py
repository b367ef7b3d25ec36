"""What benchmarks read from the folder of a whole run."""

import pytest

from headrace.benchruns import FinishedRun
from headrace.config import load
from headrace.monitor.progress import Summary


def finished(times: list[float], *, versions: int) -> FinishedRun:
    config = load(
        [],
        [f"staleness.max_versions={versions}", "learner.batch_groups=2", "learner.group_size=4"],
    )
    rows: list[dict[str, float | None]] = [
        {"step": float(step), "time": at} for step, at in enumerate(times, 1)
    ]
    return FinishedRun(config, Summary(run="r", version=len(times), steps=len(times)), rows)


def test_a_rate_leaves_out_the_filling_and_the_draining_of_the_window() -> None:
    # one step in 4 s in balance; the first takes longer, and the last ones train what is left
    times = [50.0, 54.0, 58.0, 62.0, 66.0, 67.0, 68.0]
    assert finished(times, versions=1).samples_per_s() == pytest.approx(2 * 4 / 4)


def test_a_run_that_is_never_in_balance_has_no_rate() -> None:
    with pytest.raises(ValueError, match="4 steps are too few for a window of 2 batches"):
        finished([1.0, 2.0, 3.0, 4.0], versions=1).samples_per_s()
