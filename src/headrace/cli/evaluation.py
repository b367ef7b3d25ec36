"""The running part of `headrace eval`: progress, rows, and the closing table."""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from headrace.actor.episode import Limits
from headrace.actor.evaluate import Conditions, Exam, evaluate, serving
from headrace.actor.passrates import DomainReport, PassRate, Sample, reports, row
from headrace.clock import SystemClock
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.monitor.display import duration

PLAIN_EVERY_S = 5.0
PLAIN_WIDTH = 110


class Evaluation(Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    model: str
    dtype: str
    temperature: float
    max_new_tokens: int
    max_model_len: int
    split: str
    tasks: int
    samples: int
    seed: int
    wall_s: float
    """From the first episode to the last."""
    domains: list[DomainReport]


async def evaluate_and_print(
    args: argparse.Namespace, folder: Path, config: Config, exams: Sequence[Exam], ks: list[int]
) -> int:
    """Evaluate and print; the exit code."""
    limits = Limits(
        config.sampling.max_new_tokens, config.actors.max_model_len, config.attempts.episode_s
    )
    conditions = Conditions(
        temperature=config.sampling.temperature,
        limits=limits,
        attempts=config.attempts.max,
        in_flight=config.actors.samples_in_flight,
        seed=args.seed,
    )
    with _sink(args.output) as sink:
        progress = Progress(Console(stderr=True), sum(len(e.tasks) * e.samples for e in exams))

        def on_sample(sample: Sample) -> None:
            progress.add(sample)
            if sink is not None:
                sink.write(row(sample))

        progress.say(f"starting the engine with {folder}")
        async with serving(folder, config.model.dtype, config.actors) as (engine, chat):
            if sink is not None and sink.seekable():  # not a pipe
                sink.truncate(0)
            begun = time.monotonic()
            progress.say(f"sampling {progress.total} samples")
            try:
                samples = await evaluate(engine, chat, exams, conditions, SystemClock(), on_sample)
            finally:
                progress.close()
            wall_s = time.monotonic() - begun
    result = Evaluation(
        model=str(folder),
        dtype=config.model.dtype,
        temperature=conditions.temperature,
        max_new_tokens=limits.max_new_tokens,
        max_model_len=limits.max_model_len,
        split=args.split,
        tasks=args.tasks,
        samples=args.samples,
        seed=args.seed,
        wall_s=wall_s,
        domains=reports(samples, ks),
    )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        # names of domains and classes of failures are no markup
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        console = Console(width=width, markup=False, emoji=False)
        console.print(tables(result, ks), highlight=False)
    return 1 if any(not domain.judged for domain in result.domains) else 0


def _sink(path: Path | None) -> "contextlib.AbstractContextManager[BinaryIO | None]":
    if path is None:
        return contextlib.nullcontext()
    try:
        # whole lines, at once; what an earlier evaluation wrote stays until there is more to write
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error


class Progress:
    """One line on stderr: refreshed in a terminal, repeated every few seconds elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self.total = total
        self._done = self._right = self._unjudged = 0
        self._started = time.monotonic()
        self._shown = float("-inf")
        self._open = False

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._started = time.monotonic()

    def add(self, sample: Sample) -> None:
        """Count a finished sample."""
        self._done += 1
        self._right += sample.success
        self._unjudged += not sample.judged
        every = 0.2 if self._console.is_terminal else PLAIN_EVERY_S
        if time.monotonic() >= self._shown + every or self._done == self.total:
            self._show()

    def close(self) -> None:
        """End the line; says how far an evaluation came that was stopped."""
        if self._open:
            self._console.print()
        if self._done < self.total:
            self.say(f"stopped after {self._done} of {self.total} samples")

    def _show(self) -> None:
        self._shown = time.monotonic()
        self._open = self._console.is_terminal
        judged = self._done - self._unjudged
        self._console.print(
            f"{self._done} of {self.total} samples, {self._right} of {judged} right, "
            f"{self._unjudged} not judged, {duration(self._shown - self._started)}",
            end="\r" if self._open else "\n",
            highlight=False,
        )


def tables(result: Evaluation, ks: Sequence[int]) -> Group:
    """The result for people."""
    title = (
        f"{result.model}: {result.split}, {result.samples} of each task, "
        f"temperature {result.temperature:g}, {duration(result.wall_s)}"
    )
    rates = Table(title=Text(title), title_justify="left")
    for name in ("domain", "tasks", *(f"pass@{k}, 95 %" for k in ks)):
        rates.add_column(name)
    several = any(len(domain.success_by_turn) > 1 for domain in result.domains)
    for name in (*(["by turn"] if several else []), "score", "tokens", "seconds"):
        rates.add_column(name)
    failures = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for domain in result.domains:
        name = f"{domain.domain}:{domain.level}"
        found = {rate.k: rate for rate in domain.pass_at}
        turns = " ".join(f"{100 * share:.0f}" for share in domain.success_by_turn)
        rates.add_row(
            name,
            str(domain.tasks),
            *(_rate(found.get(k)) for k in ks),
            *([f"{turns} %"] if several else []),
            f"{domain.score:.3f}",
            f"{domain.sampled_tokens:.0f}",
            f"{domain.wall_s:.1f}",
        )
        failures.add_row(Text(name, style="bold"), "model", _counts(domain.model_failures))
        lost = _counts(domain.environment_failures)
        retried = f", {domain.retried} judged after a retry" if domain.retried else ""
        failures.add_row("", "environment", lost + retried)
    return Group(rates, Text("failures by side and class"), failures)


def _rate(rate: PassRate | None) -> str:
    if rate is None:
        return "-"
    return f"{100 * rate.mean:.1f} % ({100 * rate.low:.0f}-{100 * rate.high:.0f})"


def _counts(counts: dict[str, int]) -> str:
    return "  ".join(f"{name} {count}" for name, count in counts.items()) or "none"
