"""Packing: the trajectories of one batch become micro-batches of at most `token_budget` tokens.

A micro-batch is one row of tokens cut into segments. Where it pays, a group's prompt is one segment
and each completion another that names it as its prefix:

    tokens      [ prompt | completion 0 | completion 1 | ... ]
    positions     0..P-1   P..            P..
    prefix_of     -1       0              0

The hidden row of the last prompt token then predicts the first token of every completion; `rows`
says for each trained token which row predicts it. A sequence ends before its last sampled token,
which predicts nothing. Prompt and environment tokens are context and never targets.

The result depends on the set of trajectories and not on their order. Micro-batches are numpy
arrays; the model turns them into tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from headrace.broker.records import ROLE_SAMPLED, Trajectory
from headrace.errors import TrainingError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

TILE = 64
"""Rows of an attention tile in the cost estimate."""


@dataclass(frozen=True)
class Cost:
    """FLOPs of one layer, to decide whether sharing a prompt pays.

    Attributes:
        token: of the linear layers, per token.
        tile: of attention, per visited `TILE` x `TILE` tile and all heads.
    """

    token: float
    tile: float


@dataclass(frozen=True, eq=False)
class Sample:
    """One trajectory as arrays.

    Attributes:
        ordinal: the group's ordinal.
        index: slot within the group.
        tokens: `[T]` token ids up to the last sampled one.
        prompt: tokens before the first sampled one.
        sampled: `[S]` positions of the sampled tokens, ascending.
        behaviour: `[S]` the sampler's log-probabilities.
        version: `[S]` policy version that sampled each token.
        advantage: `[S]` of the turn that each token belongs to.
    """

    ordinal: int
    index: int
    tokens: Int32
    prompt: int
    sampled: Int64
    behaviour: Float32
    version: Int64
    advantage: Float32

    @property
    def inputs(self) -> int:
        """Tokens that must be read to predict every sampled one."""
        return len(self.tokens) - 1

    @property
    def key(self) -> tuple[int, int]:
        """Sorting key: (ordinal, index)."""
        return self.ordinal, self.index


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """T tokens in B segments, S of the tokens that follow them being trained.

    Attributes:
        tokens: `[T]` token ids.
        positions: `[T]` position of each token in its own sequence.
        cu_seqlens: `[B + 1]` boundaries of the segments.
        prefix_of: `[B]` segment that is this one's prefix, -1 for none; None when no prompt is
            shared.
        rows: `[S]` row whose hidden state predicts the trained token.
        targets: `[S]` the trained token ids.
        behaviour: `[S]` the sampler's log-probabilities.
        advantage: `[S]` advantage of each trained token.
        version: `[S]` policy version that sampled each trained token.
        sample: `[S]` number of the sample within the micro-batch.
    """

    tokens: Int64
    positions: Int64
    cu_seqlens: Int32
    prefix_of: Int32 | None
    rows: Int64
    targets: Int64
    behaviour: Float32
    advantage: Float32
    version: Int64
    sample: Int64


@dataclass(frozen=True, eq=False)
class _Unit:
    """Samples that stay together because they share one prompt, or a single sample."""

    samples: list[Sample]
    shared: bool

    @property
    def tokens(self) -> int:
        if not self.shared:
            return self.samples[0].inputs
        prompt = self.samples[0].prompt
        return prompt + sum(sample.inputs - prompt for sample in self.samples)


def to_sample(trajectory: Trajectory, advantages: Sequence[float]) -> Sample | None:
    """Arrays of a trajectory; None when nothing in it was sampled.

    Args:
        trajectory: the record.
        advantages: one for each model turn.

    Raises:
        TrainingError: the first token was sampled, so that nothing predicts it.
    """
    turns = [(span.start, span.end) for span in trajectory.roles if span.value == ROLE_SAMPLED]
    sampled = _expand(turns)
    if not len(sampled):
        return None
    if sampled[0] == 0:
        raise TrainingError(
            f"sample {trajectory.group}.{trajectory.index}: the first token is a sampled one; "
            "a trajectory starts with a prompt"
        )
    version = np.repeat(
        np.array([span.value for span in trajectory.versions], np.int64),
        [span.end - span.start for span in trajectory.versions],
    )
    return Sample(
        ordinal=trajectory.group,
        index=trajectory.index,
        tokens=trajectory.tokens.numpy()[: sampled[-1] + 1].astype(np.int32),
        prompt=int(sampled[0]),
        sampled=sampled,
        behaviour=trajectory.logprobs.numpy().astype(np.float32),
        version=version,
        advantage=np.repeat(
            np.array(advantages, np.float32), [end - start for start, end in turns]
        ),
    )


def pack(
    samples: Iterable[Sample], *, token_budget: int, share_prompts: bool, cost: Cost
) -> list[MicroBatch]:
    """Pack samples into as few micro-batches as first-fit-decreasing finds.

    Args:
        samples: of any number of groups, in any order.
        token_budget: most tokens of a micro-batch; a longer sample gets one of its own.
        share_prompts: compute the prompt of a group once where the estimate says that it pays.
            Groups whose prompts differ are never shared.
        cost: of the model, for that estimate.
    """
    ordered = sorted(samples, key=lambda sample: sample.key)
    units: list[_Unit] = []
    for _, members in groupby(ordered, key=lambda sample: sample.ordinal):
        units += _units(list(members), token_budget, share_prompts, cost)
    bins: list[list[_Unit]] = []
    room: list[int] = []
    # stable sorting keeps (ordinal, index) between units of one size
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        place = next((i for i, free in enumerate(room) if unit.tokens <= free), None)
        if place is None:
            bins.append([])
            room.append(token_budget)
            place = len(bins) - 1
        bins[place].append(unit)
        room[place] -= unit.tokens
    for content in bins:
        content.sort(key=lambda unit: unit.samples[0].key)
    return [_lay_out(content) for content in sorted(bins, key=lambda c: c[0].samples[0].key)]


def _units(group: list[Sample], token_budget: int, share_prompts: bool, cost: Cost) -> list[_Unit]:
    """Cut a group into runs that share a prompt and fit the budget, or into single samples."""
    single = [_Unit([sample], shared=False) for sample in group]
    first = group[0]
    prompt = first.tokens[: first.prompt]
    same = all(
        sample.prompt == first.prompt and np.array_equal(sample.tokens[: first.prompt], prompt)
        for sample in group
    )
    if not share_prompts or not same:
        return single
    units: list[_Unit] = []
    run: list[Sample] = []
    size = first.prompt
    for sample in group:
        extra = sample.inputs - first.prompt
        if run and size + extra > token_budget:
            units.append(_Unit(run, shared=True))
            run, size = [], first.prompt
        run.append(sample)
        size += extra
    units.append(_Unit(run, shared=True))
    return [part for unit in units for part in _shared_if_it_pays(unit, cost)]


def _shared_if_it_pays(unit: _Unit, cost: Cost) -> list[_Unit]:
    prompt = unit.samples[0].prompt
    apart = together = 0.0
    for sample in unit.samples:
        completion = sample.inputs - prompt
        apart += sample.inputs * cost.token + _triangle(sample.inputs) * cost.tile
        tiles = _triangle(completion) + _tiles(completion) * _tiles(prompt)
        together += completion * cost.token + tiles * cost.tile
    together += prompt * cost.token + _triangle(prompt) * cost.tile
    if len(unit.samples) > 1 and together < apart:
        return [unit]
    return [_Unit([sample], shared=False) for sample in unit.samples]


def _tiles(rows: int) -> int:
    return -(-rows // TILE)


def _triangle(rows: int) -> int:
    """Tiles that causal attention over `rows` rows visits."""
    return _tiles(rows) * (_tiles(rows) + 1) // 2


class _Row:
    """The row of tokens of a micro-batch while it is laid out."""

    def __init__(self) -> None:
        self.tokens: list[Int32] = []
        self.positions: list[Int64] = []
        self.boundaries = [0]
        self.prefix_of: list[int] = []

    def add(self, tokens: Int32, position: int, prefix: int) -> int:
        """Append a segment whose first token has the given position; returns its first row."""
        start = self.boundaries[-1]
        self.tokens.append(tokens)
        self.positions.append(np.arange(position, position + len(tokens), dtype=np.int64))
        self.boundaries.append(start + len(tokens))
        self.prefix_of.append(prefix)
        return start


def _lay_out(units: Sequence[_Unit]) -> MicroBatch:
    row = _Row()
    samples: list[Sample] = []
    rows: list[Int64] = []
    for unit in units:
        shared_prompt = unit.samples[0].prompt if unit.shared else 0
        prefix = -1
        prompt_row = 0
        if unit.shared:
            prefix = len(row.prefix_of)
            prompt_row = row.add(unit.samples[0].tokens[:shared_prompt], 0, -1)
        for sample in unit.samples:
            own = sample.tokens[shared_prompt:-1]
            # a completion of one token is predicted by the prompt alone
            start = row.add(own, shared_prompt, prefix) if len(own) else 0
            before = sample.sampled - 1
            in_prompt = before < shared_prompt
            rows.append(np.where(in_prompt, prompt_row + before, start + before - shared_prompt))
            samples.append(sample)
    lengths = [len(sample.sampled) for sample in samples]
    return MicroBatch(
        tokens=np.concatenate(row.tokens).astype(np.int64),
        positions=np.concatenate(row.positions),
        cu_seqlens=np.array(row.boundaries, np.int32),
        prefix_of=np.array(row.prefix_of, np.int32) if any(u.shared for u in units) else None,
        rows=np.concatenate(rows),
        targets=np.concatenate([s.tokens[s.sampled] for s in samples]).astype(np.int64),
        behaviour=np.concatenate([s.behaviour for s in samples]),
        advantage=np.concatenate([s.advantage for s in samples]),
        version=np.concatenate([s.version for s in samples]),
        sample=np.repeat(np.arange(len(samples), dtype=np.int64), lengths),
    )


def _expand(spans: Iterable[tuple[int, int]]) -> Int64:
    parts = [np.arange(start, end, dtype=np.int64) for start, end in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
