"""A run's samples as rows: how each slot was decided, and what became of it.

All rows of a run are held at once, so they are kept small: they share one copy of each text.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from sys import intern

import msgspec

from headrace.broker.records import (
    Failed,
    Issued,
    Step,
    Trajectory,
    check_trajectory,
    decode,
)
from headrace.broker.runlog import Entry
from headrace.config import Config
from headrace.errors import RecordError
from headrace.learner.history import read_history

Sample = Trajectory | Failed
Slot = tuple[int, int]
"""Group and index."""
_FATES = {
    "trained": ("trained by step {}", "{}"),
    "filtered": ("filtered", "filtered"),
    "probe": ("never trained", "-"),
    "open": ("not trained yet", "-"),
}
"""What became of a sample, in a sentence and in a cell of a table."""


class Group(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an issued group's samples have in common."""

    domain: str
    level: int
    task: int
    """Index of the task in its domain, level and split."""
    purpose: str
    """`train` or `probe`."""
    version: int
    size: int


class Row(msgspec.Struct, kw_only=True, gc=False):
    """One decided slot."""

    group: int
    index: int
    seq: int
    """Place in the run log."""
    domain: str
    level: int
    task: int
    """Index of the task in its domain, level and split."""
    purpose: str
    """`train` or `probe`."""
    issued_version: int
    versions: tuple[int, ...]
    """First and last policy version that sampled a token; empty for a failed sample."""
    score: float | None
    """None for a failed sample, which is never a reward."""
    success: bool
    side: str
    """Who is charged: `model`, `environment`, or empty when the episode ended well."""
    kind: str
    """Class of the failure."""
    turns: int
    tokens: int
    sampled: int
    """Tokens that the model sampled."""
    surprisal: float
    """Sum of minus the sampler's log-probabilities of those tokens, nats."""
    step: int | None = None
    """Step that trained the sample's group."""
    fate: str = "open"
    """`trained`, `filtered`, `probe`, or `open` while no step has decided."""

    @property
    def slot(self) -> Slot:
        """Group and index."""
        return self.group, self.index

    @property
    def name(self) -> str:
        """`group.index`."""
        return f"{self.group}.{self.index}"

    @property
    def fate_told(self) -> str:
        """What became of it, for a sentence."""
        return _FATES[self.fate][0].format(self.step)

    @property
    def fate_cell(self) -> str:
        """What became of it, for a table: the step that trained it, `filtered`, or `-`."""
        return _FATES[self.fate][1].format(self.step)


@dataclass
class History:
    """What a run's log says."""

    rows: list[Row] = field(default_factory=list)
    """In log order."""
    steps: list[tuple[int, Step]] = field(default_factory=list)
    """Log sequence and record of each step."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Issued so far, by ordinal."""


async def read_run(
    config: Config, on_sample: Callable[[Row, Sample], None] = lambda _row, _sample: None
) -> History:
    """Read a run's archive and log once, from the first record to the newest.

    Args:
        config: of the run.
        on_sample: gets each row with its record, whose tokens are forgotten otherwise. The row's
            `step` and `fate` are known only when the reading has ended.

    Raises:
        HeadraceError: as `read_history`.
    """
    reader = _Reader(on_sample)
    async for entry in read_history(config):
        reader.take(entry)
    return reader.finish()


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rows are wanted; a field that is None lets all through."""

    domain: str | None = None
    purpose: str | None = None
    success: bool | None = None
    side: str | None = None
    kind: str | None = None
    version: int | None = None
    """A policy version that sampled a token of it."""
    group: int | None = None
    step: int | None = None
    level: int | None = None
    min_score: float | None = None
    max_score: float | None = None

    def matches(self, row: Row) -> bool:
        """Whether a row is wanted."""
        equal = ("domain", "purpose", "success", "side", "kind", "group", "step", "level")
        for name in equal:
            wanted = getattr(self, name)
            if wanted is not None and getattr(row, name) != wanted:
                return False
        if self.version is not None and not (
            row.versions and row.versions[0] <= self.version <= row.versions[1]
        ):
            return False
        if self.min_score is not None and (row.score is None or row.score < self.min_score):
            return False
        return self.max_score is None or (row.score is not None and row.score <= self.max_score)


class _Reader:
    def __init__(self, on_sample: Callable[[Row, Sample], None]) -> None:
        self._on_sample = on_sample
        self._history = History()
        self._early: dict[int, list[tuple[int, Sample]]] = {}
        """Samples before their group was issued, as the state machine accepts them."""
        self._decided: set[Slot] = set()

    def take(self, entry: Entry) -> None:
        parts, where = entry.subject.split("."), f"{entry.subject} at {entry.seq}"
        if parts[3] == "sample" and all(part.isdecimal() for part in parts[4:]):
            sample = _sample(entry, int(parts[4]), int(parts[5]), where)
            if sample.group in self._history.groups:
                self._add(entry.seq, sample)
            else:
                self._early.setdefault(sample.group, []).append((entry.seq, sample))
        elif parts[3] == "issued":
            issued = decode(entry.data, Issued, where=where)
            self._history.groups[issued.ordinal] = _group(issued)
            for seq, sample in self._early.pop(issued.ordinal, []):
                self._add(seq, sample)
        elif parts[3] == "step":
            self._history.steps.append((entry.seq, decode(entry.data, Step, where=where)))

    def finish(self) -> History:
        trained: dict[int, int] = {}
        filtered: set[int] = set()
        for _, step in self._history.steps:
            trained |= dict.fromkeys(step.trained, step.version)
            filtered |= set(step.filtered)
        for row in self._history.rows:
            row.step = trained.get(row.group)
            if row.purpose == "probe":
                row.fate = "probe"
            elif row.step is not None:
                row.fate = "trained"
            elif row.group in filtered:
                row.fate = "filtered"
        return self._history

    def _add(self, seq: int, sample: Sample) -> None:
        group, slot = self._history.groups[sample.group], (sample.group, sample.index)
        # the state machine ignores both kinds
        if sample.index >= group.size or slot in self._decided:
            return
        self._decided.add(slot)
        row = _row(seq, sample, group)
        self._history.rows.append(row)
        self._on_sample(row, sample)


def _sample(entry: Entry, group: int, index: int, where: str) -> Sample:
    """The record that decides a slot; one that does not decode counts as the learner counts it."""
    try:
        sample: Sample = decode(entry.data, Sample, where=where)  # type: ignore[arg-type]  # a union
        if isinstance(sample, Trajectory):
            check_trajectory(sample)
        if (sample.group, sample.index) != (group, index):
            raise RecordError(f"{where}: says it is sample {sample.group}.{sample.index}")
    except RecordError as error:
        return Failed(
            group=group, index=index, attempt=0, actor="", lineage=0, side="environment",
            kind="corrupt_record", evidence=str(error),
        )  # fmt: skip
    return sample


def _group(issued: Issued) -> Group:
    return Group(
        domain=intern(issued.task.domain),
        level=issued.task.level,
        task=issued.task.index,
        purpose=intern(issued.purpose),
        version=issued.version,
        size=issued.group_size,
    )


def _row(seq: int, sample: Sample, group: Group) -> Row:
    common = Row(
        group=sample.group,
        index=sample.index,
        seq=seq,
        domain=group.domain,
        level=group.level,
        task=group.task,
        purpose=group.purpose,
        issued_version=group.version,
        versions=(),
        score=None,
        success=False,
        side="",
        kind="",
        turns=0,
        tokens=0,
        sampled=0,
        surprisal=0.0,
    )
    if isinstance(sample, Failed):
        return msgspec.structs.replace(common, side=intern(sample.side), kind=intern(sample.kind))
    served, verdict = [span.value for span in sample.versions], sample.verdict
    return msgspec.structs.replace(
        common,
        versions=(min(served), max(served)) if served else (),
        score=verdict.score,
        success=verdict.success,
        side=intern(verdict.side),
        kind=intern(verdict.kind),
        turns=len(sample.turns),
        tokens=len(sample.tokens),
        sampled=len(sample.logprobs),
        surprisal=-float(sample.logprobs.numpy().sum()),
    )
