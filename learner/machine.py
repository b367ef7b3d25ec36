"""The learner's decisions as a deterministic state machine over the run log.

`Machine.apply` takes one record after another and nothing else: no clock, no randomness, no broker.
Timing, fetch sizes and restarts therefore never change a batch.

Rules:

* A slot (group, index) is decided by its first record.
* A group is complete when all its slots are decided. A complete training group whose valid scores
  do not differ is filtered; the others are informative.
* The batch is the next B informative training groups in ordinal order; every lower ordinal must be
  complete. It is formed at the first record after which this holds.
* `outstanding` groups are those issued but neither filtered nor listed in a durable step; with at
  most (η + 1)·B of them, no token is trained more than η versions after it was sampled.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.broker.records import (
    Failed,
    Issued,
    RunConfig,
    Skip,
    Step,
    Trajectory,
    check_trajectory,
    decode,
)
from headrace.broker.runlog import Entry
from headrace.errors import LogError, RecordError
from headrace.learner.advantages import informative

Sample = Trajectory | Failed


class Group(msgspec.Struct):
    """An issued group and the samples that arrived."""

    issued: Issued
    samples: dict[int, Sample]

    @property
    def complete(self) -> bool:
        """Whether every slot is decided."""
        return len(self.samples) == self.issued.group_size

    @property
    def trajectories(self) -> list[Trajectory]:
        """The samples that can be trained, in slot order."""
        ordered = (self.samples[index] for index in sorted(self.samples))
        return [sample for sample in ordered if isinstance(sample, Trajectory)]

    @property
    def informative(self) -> bool:
        """Whether the valid scores differ."""
        return informative([t.verdict.score for t in self.trajectories])

    @property
    def missing(self) -> int:
        """Slots that are not decided."""
        return self.issued.group_size - len(self.samples)

    @property
    def failed(self) -> list[str]:
        """Slots that failed, as `group.index`."""
        return [
            f"{self.issued.ordinal}.{index}"
            for index in sorted(self.samples)
            if isinstance(self.samples[index], Failed)
        ]


class Batch(msgspec.Struct):
    """The groups of one optimizer step."""

    version: int
    """Version that training this batch produces."""
    groups: list[Group]
    filtered: list[int]
    """Ordinals filtered since the previous batch was formed."""
    failed: list[str]
    """Failed slots of the trained and filtered groups."""
    position: int
    """Log sequence at which the batch was complete."""

    @property
    def ordinals(self) -> list[int]:
        """Ordinals of the groups, ascending."""
        return [group.issued.ordinal for group in self.groups]


class Tally(msgspec.Struct):
    """Outcomes of one domain's samples."""

    samples: int = 0
    successes: int = 0
    environment_failures: int = 0
    model_failures: int = 0
    ema: float = 0.0
    """Exponential average of the success rate, 0.97 a sample."""

    def count(self, sample: Sample) -> None:
        """Add one sample."""
        if isinstance(sample, Failed):
            self.environment_failures += 1
            return
        self.samples += 1
        self.successes += sample.verdict.success
        self.model_failures += sample.verdict.side == "model"
        weight = max(0.03, 1 / self.samples)
        self.ema += weight * (sample.verdict.success - self.ema)


class Snapshot(msgspec.Struct):
    """Everything the machine knows; what a checkpoint stores."""

    position: int = 0
    version: int = 0
    """Durable steps."""
    next_ordinal: int = 0
    frontier: int = 0
    """Lowest ordinal that no batch has passed."""
    open: dict[int, Group] = {}
    """Groups in no batch yet and not filtered."""
    early: dict[int, list[Sample]] = {}
    """Samples of groups that are not issued; only a faulty actor publishes one."""
    formed: list[Batch] = []
    """Batches that are formed and not yet taken by `take_batch`."""
    unledgered: list[list[int]] = []
    """Ordinals of the batches, formed or taken, whose step is not durable."""
    filtered: list[int] = []
    """Filtered since the last batch was formed."""
    filtered_failed: list[str] = []
    filtered_in_a_row: int = 0
    """Training groups without spread, completed since one with spread."""
    formed_version: int = 0
    last_issued_seq: int = 0
    last_step_seq: int = 0
    last_skip_seq: int = 0
    skips: dict[int, str] = {}
    """Versions whose batch must not be trained, with the operator's reason."""
    totals: dict[str, int] = {}
    """Counts: issued, complete, trained, filtered, corrupt, sampled_tokens."""
    train: dict[str, Tally] = {}
    """Outcomes of training samples by domain."""
    probes: dict[int, dict[str, Tally]] = {}
    """Outcomes of probes by version and domain."""
    probes_issued: dict[int, int] = {}
    """Probe groups issued by version."""

    @property
    def purgeable(self) -> int:
        """Last record of the log that neither a resume nor an open slot needs.

        The broker refuses a second record of a slot only while it holds the first.
        """
        open_since = (group.issued.seen for group in self.open.values() if not group.complete)
        return min(open_since, default=self.position)


@dataclass(frozen=True)
class Corrupt:
    """A record that does not decode or verify; it counts as a failure of its slot."""

    group: int
    index: int
    entry: Entry
    reason: str


class Machine:
    """Forms batches from the log. See the module's rules."""

    def __init__(
        self,
        config: RunConfig,
        snapshot: Snapshot | None = None,
        *,
        on_corrupt: Callable[[Corrupt], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.state = snapshot or Snapshot()
        self.on_corrupt = on_corrupt

    @property
    def outstanding(self) -> int:
        """Training groups issued, not filtered, and in no durable step."""
        waiting = sum(1 for g in self.state.open.values() if g.issued.purpose == "train")
        return waiting + sum(len(ordinals) for ordinals in self.state.unledgered)

    @property
    def window(self) -> int:
        """Most groups that may be outstanding: min((η + 1)·B, (N - v)·B)."""
        c = self.config
        return min(c.max_versions + 1, c.steps - self.state.version) * c.batch_groups

    @property
    def missing_samples(self) -> int:
        """Slots of open groups that are not decided."""
        return sum(group.missing for group in self.state.open.values())

    def open_probes(self) -> int:
        """Probe groups that are not complete."""
        return sum(1 for g in self.state.open.values() if g.issued.purpose == "probe")

    def take_batch(self) -> Batch | None:
        """Next formed batch, in order; each is handed out once."""
        return self.state.formed.pop(0) if self.state.formed else None

    def apply(self, entry: Entry) -> None:
        """Take the next record of the log.

        Raises:
            LogError: the record contradicts the state; the log or this program is broken.
        """
        s = self.state
        if entry.seq != s.position + 1:
            raise LogError(f"record {entry.seq} does not follow position {s.position}")
        kind = entry.subject.split(".")[3]
        where = f"{entry.subject} at {entry.seq}"
        if kind == "sample":
            slot = entry.subject.split(".")[4:]
            if len(slot) == 2 and all(part.isdecimal() for part in slot):
                self._apply_sample(self._decode_sample(entry, where))
            else:
                self._count("corrupt")
        elif kind == "issued":
            self._apply_issued(decode(entry.data, Issued, where=where), entry.seq)
        elif kind == "step":
            self._apply_step(decode(entry.data, Step, where=where), entry.seq)
        elif kind == "skip":
            self._apply_skip(decode(entry.data, Skip, where=where), entry.seq)
        elif kind == "config":
            self._apply_config(decode(entry.data, RunConfig, where=where))
        else:
            raise LogError(f"{where}: no record has this subject")
        s.position = entry.seq
        self._form_batches()

    def _decode_sample(self, entry: Entry, where: str) -> Sample:
        group, index = (int(part) for part in entry.subject.split(".")[-2:])
        try:
            sample: Sample = decode(entry.data, Sample, where=where)  # type: ignore[arg-type]  # a union
            if isinstance(sample, Trajectory):
                check_trajectory(sample)
            if (sample.group, sample.index) != (group, index):
                raise RecordError(f"{where}: says it is sample {sample.group}.{sample.index}")
        except RecordError as error:
            self._count("corrupt")
            self.on_corrupt(Corrupt(group, index, entry, str(error)))
            digest = hashlib.sha256(entry.data).hexdigest()
            return _refused(group, index, f"{error} (sha256 {digest[:16]})")
        return sample

    def _apply_config(self, config: RunConfig) -> None:
        if self.outstanding:
            raise LogError("the configuration changed while groups were outstanding")
        self.config = config

    def _apply_issued(self, issued: Issued, seq: int) -> None:
        s = self.state
        if issued.ordinal != s.next_ordinal:
            raise LogError(f"group {issued.ordinal} was issued where {s.next_ordinal} was next")
        s.open[issued.ordinal] = Group(issued, {})
        s.next_ordinal += 1
        s.last_issued_seq = seq
        early = s.early.pop(issued.ordinal, [])
        if issued.purpose == "probe":
            s.probes_issued[issued.version] = s.probes_issued.get(issued.version, 0) + 1
        else:
            self._count("issued")
        for sample in early:
            self._apply_sample(sample)

    def _apply_sample(self, sample: Sample) -> None:
        s = self.state
        if sample.group >= s.next_ordinal:
            # the broker holds the slot for decided, so it must be decided here when it is issued
            s.early.setdefault(sample.group, []).append(sample)
            return
        group = s.open.get(sample.group)
        # the broker refuses a second record of a slot; a group that is gone was decided whole
        if group is None or sample.index in group.samples:
            return
        if not 0 <= sample.index < group.issued.group_size:
            return
        if isinstance(sample, Trajectory) and _sampled_before(sample, group.issued.version):
            # the staleness bound rests on this: no actor may sample below its task's version
            self._count("corrupt")
            sample = _refused(sample.group, sample.index, "sampled by weights below the task's")
        group.samples[sample.index] = sample
        probe = group.issued.purpose == "probe"
        tallies = s.probes.setdefault(group.issued.version, {}) if probe else s.train
        tallies.setdefault(group.issued.task.domain, Tally()).count(sample)
        if isinstance(sample, Trajectory):
            self._count("sampled_tokens", len(sample.logprobs))
        if not group.complete:
            return
        if probe:
            del s.open[sample.group]
            return
        self._count("complete")
        if group.informative:
            s.filtered_in_a_row = 0
            return
        del s.open[sample.group]
        s.filtered.append(sample.group)
        s.filtered_failed += group.failed
        s.filtered_in_a_row += 1
        self._count("filtered")

    def _apply_step(self, step: Step, seq: int) -> None:
        s = self.state
        if step.version != s.version + 1 or not s.unledgered:
            raise LogError(f"step {step.version} is recorded where {s.version + 1} was next")
        if step.trained != s.unledgered[0]:
            raise LogError(
                f"step {step.version} trained groups {step.trained}, but the log forms "
                f"{s.unledgered[0]}"
            )
        s.unledgered.pop(0)
        s.version = step.version
        s.last_step_seq = seq
        self._count("trained", len(step.trained))

    def _apply_skip(self, skip: Skip, seq: int) -> None:
        self.state.last_skip_seq = seq
        # too late for a step that is durable: what it did is in the ledger
        if skip.version > self.state.version:
            self.state.skips[skip.version] = skip.reason

    def _form_batches(self) -> None:
        s, size = self.state, self.config.batch_groups
        while True:
            chosen: list[Group] = []
            ordinal = s.frontier
            while ordinal < s.next_ordinal and len(chosen) < size:
                group = s.open.get(ordinal)
                if group is not None and group.issued.purpose == "train":
                    if not group.complete:
                        return
                    chosen.append(group)
                ordinal += 1
            if len(chosen) < size:
                return
            s.frontier = ordinal
            s.formed_version += 1
            for group in chosen:
                del s.open[group.issued.ordinal]
            failed = [slot for group in chosen for slot in group.failed] + s.filtered_failed
            batch = Batch(s.formed_version, chosen, s.filtered, failed, s.position)
            s.formed.append(batch)
            s.unledgered.append(batch.ordinals)
            s.filtered, s.filtered_failed = [], []

    def _count(self, name: str, amount: int = 1) -> None:
        self.state.totals[name] = self.state.totals.get(name, 0) + amount


def _sampled_before(sample: Trajectory, version: int) -> bool:
    return any(span.value < version for span in sample.versions)


def _refused(group: int, index: int, evidence: str) -> Failed:
    return Failed(
        group=group,
        index=index,
        attempt=0,
        actor="",
        lineage=0,
        side="environment",
        kind="corrupt_record",
        evidence=evidence,
    )
