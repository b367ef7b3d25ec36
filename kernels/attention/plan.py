"""Which tiles of the score matrix are visited: shared by the kernels, the tests and the costs.

A span is `(first row, row after the last, causal)`. A query tile walks spans of keys, a key tile
walks spans of queries. Spans are exact: a tile's work is the number of blocks of the inner size
that cover its spans, whatever the mask inside them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.kernels.attention.layout import Layout

Span = tuple[int, int, bool]


@dataclass(frozen=True)
class Mask:
    """Which rows see which keys.

    Attributes:
        layout: the segments and their shared prefixes.
        window: sliding window in tokens within a segment, or None.
        block_size: rows per block of `selection`; 0 without one.
        selection: for each block of queries, segment after segment, its sorted blocks of keys;
            None for all.
    """

    layout: Layout
    window: int | None = None
    block_size: int = 0
    selection: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Tile:
    """Consecutive rows of one segment and the spans of the other side that they meet.

    Attributes:
        start: first row.
        stop: row after the last.
        spans: shared prefix first, then the segment's own, ascending.
    """

    start: int
    stop: int
    spans: tuple[Span, ...]

    def visits(self, inner: int) -> int:
        """Blocks of `inner` rows that cover the spans."""
        return sum(-(-(end - begin) // inner) for begin, end, _ in self.spans)


def query_tiles(mask: Mask, rows: int) -> list[Tile]:
    """Tiles of at most `rows` queries, each with the keys that any of its rows sees.

    Segments, and blocks of a selection, are cut from their own start, so that a tile's shape does
    not depend on where the segment lies.
    """
    tiles = []
    for segment, first, last, chosen in _stretches(mask):
        prefix = mask.layout.prefix_rows(segment)
        before: tuple[Span, ...] = ((*prefix, False),) if prefix[0] < prefix[1] else ()
        origin = mask.layout.starts[segment]
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            low = origin if mask.window is None else max(origin, start - mask.window + 1)
            pieces = ((low, stop),) if chosen is None else _pieces(chosen, mask, origin, low, stop)
            own = tuple((begin, end, True) for begin, end in pieces)
            tiles.append(Tile(start, stop, before + own))
    return tiles


def key_tiles(mask: Mask, rows: int) -> list[Tile]:
    """Tiles of at most `rows` keys, each with the queries that see any of its rows."""
    seen_by = _runs_by_prefix(mask.layout)
    tiles = []
    readers = _readers(mask)
    for number, (segment, first, last, _) in enumerate(_stretches(mask)):
        end = mask.layout.stops[segment]
        children = tuple((a, b, False) for a, b in seen_by.get(segment, ()))
        origin = mask.layout.starts[segment]
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            high = end if mask.window is None else min(end, stop - 1 + mask.window)
            if readers is None:
                pieces: tuple[tuple[int, int], ...] = ((start, high),)
            else:
                pieces = _pieces(readers[number], mask, origin, start, high)
            own = tuple((begin, finish, True) for begin, finish in pieces)
            tiles.append(Tile(start, stop, children + own))
    return tiles


def _stretches(mask: Mask) -> Iterator[tuple[int, int, int, tuple[int, ...] | None]]:
    """Segment, first row, row after the last, chosen blocks: whole segments, or their blocks."""
    layout = mask.layout
    number = itertools.count()
    for segment, (first, last) in enumerate(zip(layout.starts, layout.stops, strict=True)):
        if mask.selection is None:
            yield segment, first, last, None
            continue
        for start in range(first, last, mask.block_size):
            chosen = mask.selection[next(number)]
            yield segment, start, min(start + mask.block_size, last), chosen


def _readers(mask: Mask) -> list[tuple[int, ...]] | None:
    """For each block of keys the ascending blocks of queries, of its segment, that chose it."""
    if mask.selection is None:
        return None
    readers: list[tuple[int, ...]] = []
    base = 0
    for first, last in zip(mask.layout.starts, mask.layout.stops, strict=True):
        count = -(-(last - first) // mask.block_size)
        lists: list[list[int]] = [[] for _ in range(count)]
        for query in range(count):
            for block in mask.selection[base + query]:
                lists[block].append(query)
        readers += [tuple(queries) for queries in lists]
        base += count
    return readers


def _runs_by_prefix(layout: Layout) -> dict[int, list[tuple[int, int]]]:
    runs: dict[int, list[tuple[int, int]]] = {}
    for prefix, start, stop in layout.runs:
        runs.setdefault(prefix, []).append((start, stop))
    return runs


def _pieces(
    blocks: tuple[int, ...], mask: Mask, origin: int, low: int, high: int
) -> tuple[tuple[int, int], ...]:
    """The rows of the given blocks between `low` and `high`, consecutive blocks joined."""
    pieces: list[tuple[int, int]] = []
    for block in blocks:
        begin = max(origin + block * mask.block_size, low)
        end = min(origin + (block + 1) * mask.block_size, high)
        if begin >= end:
            continue
        if pieces and pieces[-1][1] == begin:
            pieces[-1] = (pieces[-1][0], end)
        else:
            pieces.append((begin, end))
    return tuple(pieces)
