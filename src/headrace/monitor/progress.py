"""What a run says about itself while it goes on and at its end.

The learner is the only writer. `progress.json` is replaced whole about once a second and
`summary.json` is written once, both by rename: a reader sees an old file or a new one and never
half of one.
`headrace train` and dashboards read them; nothing in a run depends on them.
"""

import math
import os
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from headrace.errors import RecordError

PROGRESS_FILE = "progress.json"
SUMMARY_FILE = "summary.json"

PHASES = ("starting", "probing", "training", "final_probing", "done")


class Failures(Struct, kw_only=True):
    """Samples that did not end well, by the side that is charged."""

    environment: int = 0
    model: int = 0


class Success(Struct, kw_only=True):
    """Success of one domain's training samples so far."""

    n: int = 0
    ok: int = 0
    ema: float = 0.0
    """Exponential moving average of success, in [0, 1]."""


class ActorView(Struct, kw_only=True):
    """One actor as its lease shows it."""

    id: str
    version: int = -1
    """Policy version that it serves; -1 before the first."""
    status: str = ""


class Progress(Struct, kw_only=True):
    """The state of a run at one moment."""

    version: int = 0
    """Newest policy version that is visible to actors."""
    steps: int = 0
    """Optimizer steps in the ledger."""
    total_steps: int = 0
    """Steps of the whole run; 0 where it is not known yet."""
    issued: int = 0
    """Training groups issued."""
    complete: int = 0
    """Training groups whose slots are all decided."""
    trained: int = 0
    """Groups in the ledger's batches."""
    filtered: int = 0
    """Groups without reward spread."""
    failed: Failures = field(default_factory=Failures)
    phase: str = "starting"
    """One of `PHASES`."""
    success: dict[str, Success] = field(default_factory=dict)
    """By domain."""
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained tokens by lag in versions."""
    started: float = 0.0
    """Unix seconds at which this learner started."""
    updated: float = 0.0
    """Unix seconds at which this was written."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Seconds that the learner waited so far, by cause."""
    actors: list[ActorView] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {self.phase!r}")


class Rate(Struct, kw_only=True):
    """Successes among independent tries."""

    n: int = 0
    ok: int = 0

    @property
    def mean(self) -> float:
        """Share of successes; 0 without tries."""
        return self.ok / self.n if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the share."""
        return wilson(self.ok, self.n)


class Summary(Struct, kw_only=True):
    """What a finished run achieved and what it cost."""

    run: str
    version: int
    steps: int
    before: dict[str, Rate] = field(default_factory=dict)
    """Held-out success by domain before the first step; empty when probing is off."""
    after: dict[str, Rate] = field(default_factory=dict)
    """Held-out success by domain after the last step."""
    trained: int = 0
    """Groups trained."""
    filtered: int = 0
    """Groups without reward spread."""
    failed: Failures = field(default_factory=Failures)
    """Samples, by side."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained tokens by lag in versions."""
    time_s: dict[str, float] = field(default_factory=dict)
    """Where the learner's wall-clock time went, in seconds by activity or cause of waiting."""
    wall_s: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    checkpoint: str = ""
    """Folder that transformers and vLLM load."""


def wilson(ok: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """Score interval of a binomial proportion (Wilson, JASA 22, 1927).

    Args:
        ok: successes; a fraction where tries are weighted.
        n: tries; (0, 1) is returned for none.
        z: standard normal quantile; the default gives 95 %.

    Returns:
        Lower and upper bound in [0, 1].
    """
    if n == 0:
        return 0.0, 1.0
    p = ok / n
    denominator = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / denominator
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def write_progress(run_dir: Path, progress: Progress) -> None:
    """Replace `progress.json` of a run folder."""
    _replace(run_dir / PROGRESS_FILE, msgspec.json.encode(progress))


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Replace `summary.json` of a run folder."""
    _replace(
        run_dir / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    )


def read_progress(run_dir: Path) -> Progress | None:
    """Read `progress.json`; None before the learner wrote one.

    Raises:
        RecordError: it does not hold a progress record.
    """
    return _read(run_dir / PROGRESS_FILE, Progress)


def read_summary(run_dir: Path) -> Summary | None:
    """Read `summary.json`; None before the run ended.

    Raises:
        RecordError: it does not hold a summary.
    """
    return _read(run_dir / SUMMARY_FILE, Summary)


T = TypeVar("T")


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordError(f"{path}: not a {kind.__name__.lower()}: {error}") from error


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(data)
    aside.replace(path)


def difference(before: Rate, after: Rate) -> tuple[float, float]:
    """95 % interval of the difference of two shares, later minus earlier.

    Source: Newcombe's hybrid score interval, Statistics in Medicine 17, 1998, method 10.
    """
    gain = after.mean - before.mean
    (low1, high1), (low2, high2) = before.interval, after.interval
    down = math.hypot(after.mean - low2, high1 - before.mean)
    up = math.hypot(high2 - after.mean, before.mean - low1)
    return gain - down, gain + up
