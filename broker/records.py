"""Records of the run log and messages of the other streams: what crosses a process boundary.

All are MessagePack arrays with a tag, encoded by `encode` and read back by `decode`, which checks
type, protocol version and size before anything is used. Arrays are little-endian bytes with a
declared dtype. Token roles and policy versions are runs `Span(value, start, end)`.
"""

import math
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct

from headrace.errors import RecordError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PROTOCOL = 1
MAX_RECORD_BYTES = 4 << 20
DTYPES = {"int32": 4, "float32": 4}

ROLE_PROMPT = 0
ROLE_SAMPLED = 1
ROLE_ENVIRONMENT = 2


class Record(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything that is stored or sent. The first field is the protocol version."""

    protocol: int = PROTOCOL


class Span(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`value` holds for token positions `start <= position < end`."""

    value: int
    start: int
    end: int


class Array(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A one-dimensional array as little-endian bytes."""

    dtype: str
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"array dtype {self.dtype!r} is not one of {sorted(DTYPES)}")
        if len(self.data) % DTYPES[self.dtype]:
            raise ValueError(f"{len(self.data)} bytes do not hold whole {self.dtype} values")

    def __len__(self) -> int:
        return len(self.data) // DTYPES[self.dtype]

    @classmethod
    def of(cls, dtype: str, values: object) -> "Array":
        """Pack a sequence or numpy array as `dtype`."""
        import numpy as np

        return cls(dtype, np.asarray(values, np.dtype(dtype).newbyteorder("<")).tobytes())

    def numpy(self) -> "npt.NDArray[np.generic]":
        """Read-only view of shape `[len(self)]`."""
        import numpy as np

        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<"))


class TaskRef(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Names one task: the domain's generator makes the same task again from it, anywhere."""

    domain: str
    level: int
    split: str
    """`train` or `heldout`; the two never share a task."""
    index: int
    hash: str
    """Hash of the generated task; an actor whose domain code makes another task must not run it."""


class RunConfig(Record, frozen=True, kw_only=True, tag="config"):
    """First record of a log. A change is a new record, made only when the window is drained."""

    batch_groups: int
    max_versions: int
    """Staleness bound: no token is trained at version v if sampled by weights older than v minus
    this."""
    group_size: int
    steps: int
    seed: int
    config_hash: str


class Issued(Record, frozen=True, kw_only=True, tag="issued"):
    """A group was issued: a decision of the learner, fenced by the last record of this subject."""

    ordinal: int
    task: TaskRef
    purpose: str
    """`train` or `probe`; probes never enter a batch."""
    group_size: int
    version: int
    lineage: int
    deadline: float
    """Unix seconds after which the learner decides empty slots as failed (`no_actor`)."""
    seed: int
    seen: int
    """Log position (sequence) at which the decision was made."""


class Execution(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One process that really ran in the sandbox for this sample."""

    purpose: str
    """`tool`, `check` or `score`."""
    status: str
    exit_code: int | None
    signal: int | None
    wall_s: float
    cpu_s: float
    isolation: str
    output_sha256: str


class Check(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One thing that a scorer examined."""

    name: str
    passed: bool
    detail: str = ""


class Verdict(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What an environment says of an episode that it could judge."""

    score: float
    """Final score in [0, 1]."""
    success: bool
    step_scores: list[float]
    """One score for each model turn."""
    checks: list[Check]
    side: str = ""
    """Empty when the episode ended well; `model` when the model is charged."""
    kind: str = ""
    """Class of the failure, e.g. `assertion`, `timeout`, `no_code`."""
    evidence: str = ""


class Turn(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One model turn: token positions `[start, end)` of the sampled tokens, and how it stopped."""

    start: int
    end: int
    stop: str
    """`stop` (end-of-turn token), or `length`."""
    generate_s: float
    execute_s: float


class Trajectory(Record, frozen=True, kw_only=True, tag="trajectory"):
    """A finished sample. T tokens, S of them sampled by the model."""

    group: int
    index: int
    attempt: int
    actor: str
    lineage: int
    tokens: Array
    """int32 `[T]`: exactly what the engine read and sampled, never re-tokenised."""
    roles: list[Span]
    """Roles of all T tokens, contiguous."""
    versions: list[Span]
    """Policy version of every sampled token; covers the sampled positions and nothing else."""
    logprobs: Array
    """float32 `[S]`: the sampler's processed log-probabilities of the sampled tokens, nats."""
    temperature: float
    verdict: Verdict
    turns: list[Turn]
    executions: list[Execution]
    queue_s: float
    """Seconds between taking the task and the first token request."""
    wall_s: float


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """A slot that got no trajectory. It is never a reward."""

    group: int
    index: int
    attempt: int
    actor: str
    lineage: int
    side: str
    """`environment` (sandbox, scorer, engine, deadline)."""
    kind: str
    """Class of the failure, e.g. `no_actor`, `scorer_error`, `sandbox_error`, `corrupt_record`."""
    evidence: str


class Step(Record, frozen=True, kw_only=True, tag="step"):
    """The ledger: what one optimizer step trained."""

    version: int
    """Version that this step produced; the first step produces 1."""
    lineage: int
    trained: list[int]
    """Ordinals of the batch, ascending."""
    filtered: list[int]
    """Ordinals of training groups without reward spread, decided since the previous step."""
    failed: list[str]
    """Slots (`group.index`) of those groups that ended as `Failed`."""
    position: int
    """Log sequence at which the batch was complete."""
    weights_hash: str
    """Hash of the weights that this version publishes."""
    metrics: dict[str, float]
    skipped: bool = False
    """The batch was passed over on an operator's word; the weights are those of the version
    before."""


class Skip(Record, frozen=True, kw_only=True, tag="skip"):
    """An operator's word that the batch of one step must not be trained (a poison batch)."""

    version: int
    """Version that the step would produce."""
    reason: str


class Task(Record, frozen=True, kw_only=True, tag="task"):
    """A message of the task queue: run the undecided slots of one issued group."""

    issued: Issued


R = TypeVar("R")

_encoder = msgspec.msgpack.Encoder()


def encode(record: Record, *, limit: int = MAX_RECORD_BYTES) -> bytes:
    """Encode a record.

    Raises:
        RecordError: it is larger than `limit` bytes.
    """
    data = _encoder.encode(record)
    if len(data) > limit:
        raise RecordError(
            f"a {type(record).__name__} record of {len(data)} bytes exceeds the limit of {limit}"
        )
    return data


def decode(data: bytes, kind: type[R], *, where: str, limit: int = MAX_RECORD_BYTES) -> R:
    """Decode and validate a record of the given type (or union of types).

    Args:
        data: the stored bytes.
        kind: record class, or a union of record classes.
        where: subject and sequence, for the error.
        limit: largest number of bytes that is looked at.

    Raises:
        RecordError: too large, not MessagePack, wrong type or fields, or another protocol version.
    """
    if len(data) > limit:
        raise RecordError(f"{where}: {len(data)} bytes exceed the limit of {limit}")
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordError(f"{where}: not a valid record: {error}") from error
    if isinstance(record, Record) and record.protocol != PROTOCOL:
        raise RecordError(
            f"{where}: protocol {record.protocol}, but this process speaks {PROTOCOL}; "
            "use the same headrace version for all processes of a run"
        )
    return record


def sample_limit(max_model_len: int) -> int:
    """Largest size in bytes of a sample record; the issue window reserves it for every open slot.

    8 bytes a token (id and log-probability) and room for the verdict and the executions.
    """
    return min(8 * max_model_len + (64 << 10), MAX_RECORD_BYTES)


def check_trajectory(trajectory: Trajectory) -> None:
    """Check the token invariants of a trajectory.

    Raises:
        RecordError: roles do not cover the tokens, versions do not cover the sampled tokens,
            a span is empty, lengths disagree, or a log-probability or a score is not a finite
            number.
    """
    length = len(trajectory.tokens)
    where = f"sample {trajectory.group}.{trajectory.index}"
    if trajectory.tokens.dtype != "int32" or trajectory.logprobs.dtype != "float32":
        raise RecordError(f"{where}: tokens must be int32 and log-probabilities float32")
    position = 0
    sampled: list[tuple[int, int]] = []
    for span in trajectory.roles:
        if span.start != position or span.end <= span.start:
            raise RecordError(f"{where}: roles are not contiguous at token {position}")
        if span.value not in {ROLE_PROMPT, ROLE_SAMPLED, ROLE_ENVIRONMENT}:
            raise RecordError(f"{where}: unknown role {span.value}")
        if span.value == ROLE_SAMPLED:
            sampled.append((span.start, span.end))
        position = span.end
    if position != length:
        raise RecordError(f"{where}: roles cover {position} of {length} tokens")
    count = sum(end - start for start, end in sampled)
    if count != len(trajectory.logprobs):
        raise RecordError(
            f"{where}: {count} sampled tokens but {len(trajectory.logprobs)} log-probabilities"
        )
    if any(span.end <= span.start for span in trajectory.versions):
        raise RecordError(f"{where}: a policy version's span is empty or runs backwards")
    covered = _positions([(span.start, span.end) for span in trajectory.versions])
    if covered != _positions(sampled):
        raise RecordError(f"{where}: policy versions do not cover the sampled tokens")
    # one such number would make a whole batch's gradient not finite
    bad = [value for value in trajectory.logprobs.numpy().tolist() if not math.isfinite(value)]
    if bad:
        raise RecordError(f"{where}: a log-probability is {bad[0]}")
    if len(trajectory.verdict.step_scores) != len(sampled):
        raise RecordError(
            f"{where}: {len(trajectory.verdict.step_scores)} step scores for {len(sampled)} turns"
        )
    for score in (trajectory.verdict.score, *trajectory.verdict.step_scores):
        if not math.isfinite(score):
            raise RecordError(f"{where}: a score is {score}")


def _positions(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge touching spans; order is kept, so overlaps and disorder stay visible."""
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
