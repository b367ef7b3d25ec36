"""What a pack looks like: boundaries, shared prefixes, block selections; checked once, cached."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class Blocks:
    """A block-sparse selection of keys.

    Every segment is cut into blocks of `size` rows from its own start; the last one may be short.
    Blocks are numbered segment after segment. Row i of `chosen` lists, for the i-th block of
    queries, the blocks of keys it attends to, counted from the start of its own segment; -1 is no
    entry and repeated entries count once. The block's own keys up to the diagonal are always
    attended, and so is the shared prefix.

    Attributes:
        size: rows per block, a multiple of 16.
        chosen: `[query blocks, width]`, integer.
    """

    size: int
    chosen: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """The segments of a pack as plain integers.

    Attributes:
        starts: first row of each segment.
        stops: row after the last of each segment.
        prefix_of: for each segment the segment attended fully before it, or -1.
        runs: `(prefix segment, first row, row after the last)` for each stretch of consecutive
            segments that share a prefix; segments without rows, or whose prefix has none, are
            left out.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    prefix_of: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]

    @property
    def end(self) -> int:
        """The row after the last segment; rows from here on belong to nobody."""
        return self.stops[-1] if self.stops else 0

    def prefix_rows(self, segment: int) -> tuple[int, int]:
        """First row and row after the last of a segment's shared prefix; equal where none is."""
        prefix = self.prefix_of[segment]
        return (self.starts[prefix], self.stops[prefix]) if prefix >= 0 else (0, 0)


def read_layout(cu_seqlens: torch.Tensor, prefix_of: torch.Tensor | None, rows: int) -> Layout:
    """Check boundaries and prefixes against the number of rows.

    The values are read on the host, so boundaries that live on a GPU cost a synchronisation.

    Raises:
        ValueError: with the offending value.
    """
    boundaries = _integers(cu_seqlens, "cu_seqlens")
    if not boundaries:
        raise ValueError("cu_seqlens is empty; it must hold at least the boundary 0")
    prefixes = None if prefix_of is None else _integers(prefix_of, "prefix_of")
    layout = _layout(boundaries, prefixes)
    if layout.end > rows:
        raise ValueError(f"cu_seqlens ends at {layout.end}, but the tensors have {rows} rows")
    return layout


def _integers(values: torch.Tensor, name: str) -> tuple[int, ...]:
    if not isinstance(values, torch.Tensor) or values.dim() != 1 or values.dtype not in INTEGERS:
        shown = (
            f"{list(values.shape)} {values.dtype}"
            if isinstance(values, torch.Tensor)
            else repr(values)
        )
        raise ValueError(f"{name} must be a one-dimensional integer tensor, not {shown}")
    return tuple(values.tolist())


@functools.lru_cache(maxsize=256)
def _layout(boundaries: tuple[int, ...], prefix_of: tuple[int, ...] | None) -> Layout:
    if boundaries[0] != 0:
        raise ValueError(f"cu_seqlens starts at {boundaries[0]}; the first boundary must be 0")
    for index, (start, stop) in enumerate(itertools.pairwise(boundaries)):
        if stop < start:
            raise ValueError(f"cu_seqlens falls from {start} to {stop} at position {index + 1}")
    count = len(boundaries) - 1
    prefixes = (-1,) * count if prefix_of is None else prefix_of
    _check_prefixes(prefixes, count)
    starts, stops = boundaries[:-1], boundaries[1:]
    return Layout(starts, stops, prefixes, _runs(starts, stops, prefixes))


def _check_prefixes(prefix_of: Sequence[int], count: int) -> None:
    if len(prefix_of) != count:
        raise ValueError(f"prefix_of has {len(prefix_of)} entries for {count} segments")
    for segment, prefix in enumerate(prefix_of):
        if not -1 <= prefix < count:
            raise ValueError(f"prefix_of[{segment}] is {prefix}; there are {count} segments")
        if prefix == segment:
            raise ValueError(f"prefix_of[{segment}] is {prefix}: the segment itself")
        if prefix >= 0 and prefix_of[prefix] != -1:
            raise ValueError(
                f"prefix_of[{segment}] is {prefix}, whose own prefix is {prefix_of[prefix]}; "
                "prefixes do not nest"
            )


def _runs(
    starts: Sequence[int], stops: Sequence[int], prefix_of: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    runs: list[tuple[int, int, int]] = []
    for start, stop, prefix in zip(starts, stops, prefix_of, strict=True):
        if prefix < 0 or start == stop or starts[prefix] == stops[prefix]:
            continue
        if runs and runs[-1][0] == prefix and runs[-1][2] == start:
            runs[-1] = (prefix, runs[-1][1], stop)
        else:
            runs.append((prefix, start, stop))
    return tuple(runs)


def read_blocks(blocks: Blocks, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Check a selection; return for each block of queries its sorted blocks of keys, own included.

    Raises:
        ValueError: with the offending value.
    """
    if blocks.size < 16 or blocks.size % 16:
        raise ValueError(f"blocks.size is {blocks.size}; it must be a multiple of 16")
    own = [
        block
        for start, stop in zip(layout.starts, layout.stops, strict=True)
        for block in range(-(-(stop - start) // blocks.size))
    ]
    chosen = blocks.chosen
    if chosen.dim() != 2 or chosen.dtype not in INTEGERS or chosen.shape[0] != len(own):
        raise ValueError(
            f"blocks.chosen must be an integer tensor [{len(own)}, width], "
            f"not {list(chosen.shape)} {chosen.dtype}"
        )
    selection = []
    for index, (row, diagonal) in enumerate(zip(chosen.tolist(), own, strict=True)):
        for block in row:
            if not -1 <= block <= diagonal:
                raise ValueError(
                    f"blocks.chosen[{index}] names block {block}; the query block is number "
                    f"{diagonal} of its segment and sees none after itself"
                )
        selection.append(tuple(sorted({*row, diagonal} - {-1})))
    return tuple(selection)
