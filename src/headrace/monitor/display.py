"""What `headrace train` shows: one refreshing table in a terminal, short lines elsewhere."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.clock import Clock
from headrace.monitor.progress import Progress, Rate, Summary

PLAIN_EVERY_S = 15.0
States = Sequence[tuple[str, str]]
"""Name and state of each process."""


class Display(Protocol):
    """Shows a run while it goes on."""

    def show(self, progress: Progress | None, states: States) -> None:
        """Show the newest state; called about once a second."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def display_for(console: Console, clock: Clock) -> Display:
    """The display that fits where the output goes."""
    return TableDisplay(console, clock) if console.is_terminal else LineDisplay(console, clock)


class TimeLeft:
    """Estimates the rest of a run from the pace of its latest steps."""

    def __init__(self, clock: Clock, steps: int = 6) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=steps)

    def estimate(self, progress: Progress) -> float | None:
        """Seconds to the last step; None before there is a pace, and outside of training."""
        if progress.phase != "training":
            return None
        now = self._clock.monotonic()
        if not self._marks or progress.steps > self._marks[-1][1]:
            self._marks.append((now, progress.steps))
        (start, first), (latest, last) = self._marks[0], self._marks[-1]
        if last == first or not progress.total_steps:
            return None
        pace = (latest - start) / (last - first)
        return max(0.0, (progress.total_steps - last) * pace - (now - latest))


class LineDisplay:
    """Prints a line at each step, each change of phase, and every `PLAIN_EVERY_S` seconds."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._left = TimeLeft(clock)
        self._shown: tuple[str, int, str] | None = None
        self._at = float("-inf")

    def show(self, progress: Progress | None, states: States) -> None:
        """See `Display`."""
        left = self._left.estimate(progress) if progress else None
        troubles = " ".join(f"{name}:{state}" for name, state in states if state != "up")
        mark = (progress.phase, progress.steps, troubles) if progress else ("", 0, troubles)
        now = self._clock.monotonic()
        if mark == self._shown and now < self._at + PLAIN_EVERY_S:
            return
        self._shown, self._at = mark, now
        line = one_line(progress, left) if progress else "waiting for the learner"
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {line}{'  ' + troubles if troubles else ''}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )

    def close(self) -> None:
        """See `Display`."""


class TableDisplay:
    """Redraws one table in place."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._left = TimeLeft(clock)
        # the supervisor forks: no thread of rich's may run beside it
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, progress: Progress | None, states: States) -> None:
        """See `Display`."""
        left = self._left.estimate(progress) if progress else None
        self._live.update(progress_table(progress, states, left), refresh=True)

    def close(self) -> None:
        """See `Display`."""
        self._live.stop()


def one_line(progress: Progress, left: float | None) -> str:
    """A run's state in one line."""
    parts = [
        f"{progress.phase} version {progress.version} step {_of(progress)}",
        f"groups {progress.issued} issued {progress.complete} complete {progress.trained} trained"
        f" {progress.filtered} filtered",
        *(f"{name} {100 * s.ema:.0f} % of {s.n}" for name, s in sorted(progress.success.items())),
        f"tokens/s {progress.generated_tokens_per_s:.0f} generated"
        f" {progress.trained_tokens_per_s:.0f} trained",
        f"lag {shares(progress.staleness)}",
        f"left {duration(left)}",
    ]
    failed = progress.failed
    if failed.environment or failed.model:
        parts.insert(2, f"failed {failed.environment} environment {failed.model} model")
    return "  ".join(parts)


def progress_table(progress: Progress | None, states: States, left: float | None) -> Table:
    """A run's state as a table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("processes", "  ".join(f"{name} {state}" for name, state in states))
    if progress is None:
        table.add_row("phase", "waiting for the learner")
        return table
    failed = progress.failed
    table.add_row("phase", f"{progress.phase}, {duration(left)} left")
    table.add_row("step", f"{_of(progress)}, version {progress.version}")
    table.add_row(
        "groups",
        f"{progress.issued} issued, {progress.complete} complete, {progress.trained} trained, "
        f"{progress.filtered} filtered",
    )
    table.add_row("failed", f"{failed.environment} environment, {failed.model} model")
    for domain, success in sorted(progress.success.items()):
        table.add_row(domain, f"{100 * success.ema:.0f} % lately, {success.ok} of {success.n}")
    table.add_row(
        "tokens/s",
        f"{progress.generated_tokens_per_s:.0f} generated, "
        f"{progress.trained_tokens_per_s:.0f} trained",
    )
    table.add_row("staleness", shares(progress.staleness))
    table.add_row("learner time", _seconds(progress.waiting))
    for actor in progress.actors:
        table.add_row(f"actor {actor.id}", f"version {actor.version} {actor.status}")
    return table


def closing(summary: Summary) -> Group:
    """What a finished run achieved and what it cost."""
    success = Table(title="held-out success, 95 % interval", title_justify="left")
    for name in ("domain", "before", "after"):
        success.add_column(name)
    for domain in sorted(summary.before.keys() | summary.after.keys()):
        success.add_row(domain, rate(summary.before.get(domain)), rate(summary.after.get(domain)))
    failed = summary.failed
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "run": f"{summary.run}, {summary.steps} steps in {duration(summary.wall_s)}",
        "groups": f"{summary.trained} trained, {summary.filtered} filtered",
        "failed": f"{failed.environment} environment, {failed.model} model",
        "tokens": f"{summary.generated_tokens} generated, {summary.trained_tokens} trained",
        "staleness": shares(summary.staleness),
        "time": _seconds(summary.time_s),
        "checkpoint": summary.checkpoint,
    }
    for name, text in rows.items():
        facts.add_row(Text(name, style="bold"), Text(text, overflow="fold"))
    return Group(success, facts) if success.row_count else Group(facts)


def rate(value: Rate | None) -> str:
    """`12 of 50, 24 % (14-37 %)`."""
    if value is None or not value.n:
        return "-"
    low, high = value.interval
    return f"{value.ok} of {value.n}, {100 * value.mean:.0f} % ({100 * low:.0f}-{100 * high:.0f} %)"


def shares(histogram: dict[int, int]) -> str:
    """A histogram over small integers as percentages: `0: 60 %  1: 40 %`."""
    total = sum(histogram.values())
    if not total:
        return "-"
    return "  ".join(f"{key}: {100 * histogram[key] / total:.0f} %" for key in sorted(histogram))


def duration(seconds: float | None) -> str:
    """`-`, `42 s`, `3 min 05 s` or `2 h 07 min`."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _of(progress: Progress) -> str:
    return f"{progress.steps}/{progress.total_steps}" if progress.total_steps else "0"


def _seconds(parts: dict[str, float]) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])
    return "  ".join(f"{name}: {duration(value)}" for name, value in largest) or "-"
