"""Whole runs as what a benchmark measures: `headrace train` as a user starts it, and its folder."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Config, load
from headrace.monitor.metrics import read_rows
from headrace.monitor.placement import headrace_command
from headrace.monitor.progress import Summary, read_summary


@dataclass(frozen=True)
class FinishedRun:
    """A run that reached its last step."""

    config: Config
    summary: Summary
    rows: list[dict[str, float | None]]
    """Of `metrics.jsonl`, one a step."""

    def samples_per_s(self) -> float:
        """Trained samples a second while the run is in balance.

        As many steps as the window holds batches are left out at both ends: at first the window
        fills, and at last nothing is issued any more and what it holds is trained.

        Raises:
            ValueError: no step is left.
        """
        times = {int(row["step"] or 0): row["time"] or 0.0 for row in self.rows}
        window = self.config.staleness.max_versions + 1
        first, last = window, max(times) - window
        if last <= first:
            raise ValueError(f"{max(times)} steps are too few for a window of {window} batches")
        learner = self.config.learner
        samples = (last - first) * learner.batch_groups * learner.group_size
        return samples / (times[last] - times[first])


def train(file: Path, overrides: list[str], *, deadline_s: float = 7200.0) -> FinishedRun:
    """Run, or go on with, what a file and overrides describe; what it prints goes to a file.

    Raises:
        ConfigError: the configuration is wrong.
        SystemExit: the run failed, or took longer than `deadline_s`.
    """
    config = load([file], overrides)
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    printed = folder / "train.out"
    with printed.open("ab") as sink:
        command = headrace_command("train", str(file), *overrides)
        try:
            code = subprocess.run(
                command, stdout=sink, stderr=sink, check=False, timeout=deadline_s
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"{folder}: the run took over {deadline_s:g} s") from error
    summary = read_summary(folder)
    if code or summary is None:
        last = printed.read_text(errors="replace").strip().rpartition("\n")[2]
        raise SystemExit(f"{folder}: the run ended with {code}: {last}")
    return FinishedRun(config, summary, read_rows(folder))
