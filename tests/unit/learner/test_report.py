"""What the learner reports, across restarts."""

import time
from pathlib import Path

from headrace.learner.machine import Machine
from headrace.learner.report import Report
from headrace.monitor.exporters.base import Exporters
from headrace.monitor.metrics import read_rows
from headrace.monitor.progress import Progress, read_progress
from tests.unit.learner.logs import run_config


class Recorder:
    """Remembers what it was given."""

    name = "Recorder"

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.phases: list[str] = []

    def step(self, version: int, values: object, at: float) -> None:
        self.steps.append(version)

    def progress(self, progress: Progress) -> None:
        self.phases.append(progress.phase)

    def close(self) -> None:
        self.phases.append("closed")


def open_report(run_dir: Path, recorder: Recorder, *, running_s: float = 0.0) -> Report:
    exporters = Exporters()
    exporters.add(recorder)
    started = time.time() - running_s
    return Report(run_dir, "run", Machine(run_config()), exporters, started=started)


def test_a_step_that_is_computed_again_after_a_restart_is_reported_once(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    report = open_report(tmp_path, first)
    for version in (1, 2):
        report.step(version, {"loss": 0.5}, 10, {0: 10}, [])
    report.close()
    report = open_report(tmp_path, second)
    for version in (2, 3):
        report.step(version, {"loss": 0.5}, 10, {0: 10}, [])
    report.close()
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3]
    assert (first.steps, second.steps) == ([1, 2], [3])


def test_progress_goes_to_the_run_folder_and_to_the_exporters_alike(tmp_path: Path) -> None:
    recorder = Recorder()
    report = open_report(tmp_path, recorder)
    report.progress("training", [])
    report.close()
    written = read_progress(tmp_path)
    assert written is not None
    assert written.phase == "training"
    assert recorder.phases == ["training", "closed"]


def test_the_time_before_the_first_report_counts_as_starting(tmp_path: Path) -> None:
    report = open_report(tmp_path, Recorder(), running_s=30.0)
    report.timesheet.switch("train")
    summary = report.summary(tmp_path)
    report.close()
    assert 30.0 <= summary.time_s["starting"] <= summary.wall_s
