"""Which tiles of the score matrix are visited: shared by the kernels, the tests and the costs."""

from dataclasses import dataclass

from headrace.kernels.attention.layout import Layout


@dataclass(frozen=True)
class Tile:
    """Consecutive query rows of one segment and the keys that any of them sees.

    Attributes:
        start: first query row.
        stop: row after the last.
        own: ascending spans `(first, last + 1)` of keys of the same segment.
        prefix: the span of the shared prefix; equal ends where there is none.
    """

    start: int
    stop: int
    own: tuple[tuple[int, int], ...]
    prefix: tuple[int, int]


def query_tiles(
    layout: Layout,
    rows: int,
    window: int | None,
    block_size: int,
    selection: tuple[tuple[int, ...], ...] | None,
) -> list[Tile]:
    """Cut every segment into tiles of `rows` query rows, from its own start.

    Args:
        layout: the pack.
        rows: query rows per tile; divides `block_size` where a selection is given.
        window: sliding window in tokens, or None.
        block_size: rows per block of `selection`.
        selection: for each block of queries its sorted blocks of keys, or None for all.
    """
    tiles = []
    block_base = 0
    for segment, (first, last) in enumerate(zip(layout.starts, layout.stops, strict=True)):
        prefix = layout.prefix_rows(segment)
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            low = first if window is None else max(first, start - window + 1)
            if selection is None:
                own: tuple[tuple[int, int], ...] = ((low, stop),)
            else:
                chosen = selection[block_base + (start - first) // block_size]
                own = _block_spans(chosen, first, block_size, low, stop)
            tiles.append(Tile(start, stop, own, prefix))
        block_base += -(-(last - first) // block_size) if selection is not None else 0
    return tiles


def _block_spans(
    chosen: tuple[int, ...], first: int, size: int, low: int, stop: int
) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for block in chosen:
        start = max(first + block * size, low)
        end = min(first + (block + 1) * size, stop)
        if start >= end:
            continue
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return tuple(spans)
