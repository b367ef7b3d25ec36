"""What the learner tells people: progress, metrics of every step, and a summary at the end."""

import time
from collections import deque
from pathlib import Path

from headrace.broker.leases import Lease
from headrace.learner.machine import Machine, Tally
from headrace.monitor.exporters.base import Exporters
from headrace.monitor.metrics import MetricsWriter
from headrace.monitor.progress import (
    ActorView,
    Failures,
    Progress,
    Rate,
    Success,
    Summary,
    write_progress,
    write_summary,
)
from headrace.process import Timesheet

_RATE_WINDOW_S = 30.0


class Report:
    """Writes `progress.json`, `metrics.jsonl` and `summary.json`, and serves the exporters."""

    def __init__(
        self,
        run_dir: Path,
        run: str,
        machine: Machine,
        exporters: Exporters,
        *,
        started: float,
        totals: dict[str, float] | None = None,
        staleness: dict[int, int] | None = None,
    ) -> None:
        """Take over from the process's start.

        Args:
            run_dir: folder of the run.
            run: its name.
            machine: state that is reported.
            exporters: who else is told.
            started: when this learner's process began, Unix time.
            totals: running totals of a checkpoint.
            staleness: trained tokens by lag, of a checkpoint.
        """
        self._run_dir = run_dir
        self._run = run
        self._machine = machine
        self._exporters = exporters
        self._metrics = MetricsWriter(run_dir)
        totals = totals or {}
        self.trained_tokens = totals.get("trained_tokens", 0.0)
        self.wall_before = totals.get("wall_s", 0.0)
        self.timesheet = Timesheet(
            {key[5:]: value for key, value in totals.items() if key.startswith("time/")},
            running_s=time.time() - started,
        )
        self.staleness = dict(staleness or {})
        self.published = -1
        self._started = started
        self._sampled: deque[tuple[float, int]] = deque()
        self._trained: deque[tuple[float, float]] = deque()

    def totals(self) -> dict[str, float]:
        """Running totals for a checkpoint."""
        times = {f"time/{name}": seconds for name, seconds in self.timesheet.seconds.items()}
        return times | {
            "trained_tokens": self.trained_tokens,
            "wall_s": self.wall_before + time.time() - self._started,
        }

    def step(
        self,
        version: int,
        metrics: dict[str, float],
        tokens: int,
        staleness: dict[int, int],
        actors: list[Lease],
    ) -> None:
        """Record one optimizer step; its row is written once, however often it is computed."""
        self.trained_tokens += tokens
        for lag, count in staleness.items():
            self.staleness[lag] = self.staleness.get(lag, 0) + count
        if version <= self._metrics.last:
            return
        domains = {
            f"success/{domain}": tally.ema for domain, tally in self._machine.state.train.items()
        }
        updates = sum(actor.counters.get("updates", 0) for actor in actors)
        paused = sum(actor.counters.get("pause_s", 0) for actor in actors)
        fleet = {"actors/alive": float(len(actors)), "actors/pause_s": paused / max(updates, 1)}
        values, at = metrics | domains | fleet, time.time()
        self._metrics.write(version, values, at=at)
        self._exporters.step(version, values, at)

    def progress(self, phase: str, actors: list[Lease]) -> None:
        """Replace `progress.json`, and tell the exporters."""
        state = self._machine.state
        now = time.monotonic()
        self._sampled.append((now, state.totals.get("sampled_tokens", 0)))
        self._trained.append((now, self.trained_tokens))
        progress = Progress(
            version=self.published,
            steps=state.version,
            total_steps=self._machine.config.steps,
            issued=state.totals.get("issued", 0),
            complete=state.totals.get("complete", 0),
            trained=state.totals.get("trained", 0),
            filtered=state.totals.get("filtered", 0),
            failed=_failures(state.train),
            phase=phase,
            success={
                domain: Success(n=tally.samples, ok=tally.successes, ema=tally.ema)
                for domain, tally in state.train.items()
            },
            generated_tokens_per_s=_rate(self._sampled),
            trained_tokens_per_s=_rate(self._trained),
            staleness=self.staleness,
            started=self._started,
            updated=time.time(),
            waiting=self.timesheet.seconds,
            actors=[
                ActorView(id=actor.id, version=actor.version, status=actor.status)
                for actor in actors
            ],
        )
        write_progress(self._run_dir, progress)
        self._exporters.progress(progress)

    def summary(self, checkpoint: Path) -> Summary:
        """Write and return `summary.json`."""
        state = self._machine.state
        summary = Summary(
            run=self._run,
            version=self.published,
            steps=state.version,
            before=_rates(state.probes.get(0, {})),
            after=_rates(state.probes.get(self._machine.config.steps, {})),
            trained=state.totals.get("trained", 0),
            filtered=state.totals.get("filtered", 0),
            failed=_failures(state.train),
            staleness=self.staleness,
            time_s=self.timesheet.seconds,
            wall_s=self.wall_before + time.time() - self._started,
            generated_tokens=state.totals.get("sampled_tokens", 0),
            trained_tokens=int(self.trained_tokens),
            checkpoint=str(checkpoint),
        )
        write_summary(self._run_dir, summary)
        return summary

    def close(self) -> None:
        """Close the files and the exporters."""
        self._metrics.close()
        self._exporters.close()


def _rate(window: "deque[tuple[float, int]] | deque[tuple[float, float]]") -> float:
    while len(window) > 2 and window[0][0] < window[-1][0] - _RATE_WINDOW_S:
        window.popleft()
    (start, first), (end, last) = window[0], window[-1]
    return (last - first) / (end - start) if end > start else 0.0


def _failures(tallies: dict[str, Tally]) -> Failures:
    return Failures(
        environment=sum(tally.environment_failures for tally in tallies.values()),
        model=sum(tally.model_failures for tally in tallies.values()),
    )


def _rates(tallies: dict[str, Tally]) -> dict[str, Rate]:
    return {domain: Rate(n=tally.samples, ok=tally.successes) for domain, tally in tallies.items()}
