"""What a mask costs on paper: pairs, tiles, floating-point operations, bytes. Not a measurement.

Everything here is arithmetic on lengths, so a million tokens cost nothing to plan; tests hold the
tile counts against the plan, the kernels' own counters and a count over the mask.
"""

from dataclasses import dataclass

from headrace.kernels.attention.launch import Launches


@dataclass(frozen=True)
class Segment:
    """One kind of segment of a pack.

    Attributes:
        length: rows.
        count: how many there are.
        prefix: rows of its shared prefix.
    """

    length: int
    count: int = 1
    prefix: int = 0


@dataclass(frozen=True)
class Shape:
    """The heads of a layer.

    Attributes:
        query_heads: query heads.
        key_heads: key and value heads.
        head_dim: columns of a head.
        bytes_per_value: 2 for bfloat16.
    """

    query_heads: int
    key_heads: int
    head_dim: int
    bytes_per_value: int = 2


@dataclass(frozen=True)
class Cost:
    """One layer's attention, forward and backward.

    Attributes:
        pairs: (query, key) pairs that the mask allows, of one head.
        forward_tiles: tiles of the score matrix visited by the forward kernel, of one head.
        efficiency: pairs over the cells of those tiles.
        forward_flops: executed by the forward kernel, over all heads.
        backward_flops: executed by the backward kernels: seven products where five would do with
            atomics, the price of a fixed order.
        bytes_moved: between memory and programs, forward and backward, without any cache.
    """

    pairs: int
    forward_tiles: int
    efficiency: float
    forward_flops: int
    backward_flops: int
    bytes_moved: int


def dense_tiles(length: int, rows: int, inner: int) -> int:
    """Tiles of a causal segment: tile i of `rows` queries visits ceil(min(L, (i+1) rows) / inner).

    In closed form where one size divides the other; a sum over tiles otherwise.
    """
    full, rest = divmod(length, rows)
    last = -(-length // inner) if rest else 0
    if rows % inner == 0:
        return rows // inner * full * (full + 1) // 2 + last
    if inner % rows == 0:
        # Runs of inner/rows tiles visit 1, 2, 3, ... blocks.
        run = inner // rows
        whole, part = divmod(full, run)
        return run * whole * (whole + 1) // 2 + part * (whole + 1) + last
    return sum(-(-((i + 1) * rows) // inner) for i in range(full)) + last


def window_tiles(length: int, rows: int, inner: int, window: int) -> int:
    """Tiles of a causal segment with a sliding window: as dense until the window is full."""
    ramp = min(length, -(-window // rows) * rows)
    total = 0
    for start in range(0, ramp, rows):
        stop = min(start + rows, length)
        total += -(-(stop - max(0, start - window + 1)) // inner)
    full, rest = divmod(length - ramp, rows)
    total += full * -(-(rows + window - 1) // inner)
    return total + (-(-(rest + window - 1) // inner) if rest else 0)


def block_tiles(length: int, rows: int, inner: int, size: int, chosen: int) -> int:
    """Tiles where each block of `size` queries reads itself and `chosen - 1` blocks far apart.

    Early blocks read the fewer that there are. `rows` and `inner` divide `size`.
    """
    per_block = size // inner
    total = 0
    blocks, rest = divmod(length, size)
    ramp = min(blocks, chosen)
    own = dense_tiles(size, rows, inner)
    total += blocks * own + size // rows * per_block * (ramp * (ramp - 1) // 2)
    total += (blocks - ramp) * (size // rows) * per_block * (chosen - 1)
    if rest:
        before = min(blocks, chosen - 1)
        total += dense_tiles(rest, rows, inner) + -(-rest // rows) * per_block * before
    return total


def segment_tiles(
    segment: Segment,
    rows: int,
    inner: int,
    window: int | None = None,
    blocks: tuple[int, int] | None = None,
) -> int:
    """Tiles that a query kernel visits for all segments of a kind, of one head.

    Args:
        segment: the segments.
        rows: queries per tile.
        inner: keys per tile.
        window: sliding window in tokens, or None.
        blocks: size and number of chosen blocks, or None; see `block_tiles`.
    """
    if blocks is not None:
        own = block_tiles(segment.length, rows, inner, *blocks)
    elif window is not None and window < segment.length:
        own = window_tiles(segment.length, rows, inner, window)
    else:
        own = dense_tiles(segment.length, rows, inner)
    shared = -(-segment.length // rows) * -(-segment.prefix // inner)
    return segment.count * (own + shared)


def segment_pairs(
    segment: Segment, window: int | None = None, blocks: tuple[int, int] | None = None
) -> int:
    """Allowed (query, key) pairs of one head for all segments of a kind."""
    length = segment.length
    reach = length if window is None else min(window, length)
    own = reach * (reach + 1) // 2 + (length - reach) * reach
    if blocks is not None:
        size, chosen = blocks
        number, rest = divmod(length, size)
        ramp = min(number, chosen)
        own = number * size * (size + 1) // 2 + rest * (rest + 1) // 2
        own += size * size * (ramp * (ramp - 1) // 2 + (number - ramp) * (chosen - 1))
        own += rest * size * min(number, chosen - 1)
    return segment.count * (own + length * segment.prefix)


def cost(
    segments: list[Segment],
    shape: Shape,
    launches: Launches,
    window: int | None = None,
    blocks: tuple[int, int] | None = None,
) -> Cost:
    """One layer's attention over a pack.

    The key kernels are taken to visit as many cells as the query kernel of the same tile would.
    """
    # Launch, rows that a tile reads of each of two tensors, products per cell.
    passes = [
        (launches.forward, launches.forward.keys, 2),
        (launches.grad_q, launches.grad_q.keys, 3),
    ]
    passes += [(row, row.queries, k * 3 + v * 2 - (k and v)) for row, k, v in launches.key_passes()]
    counts = [
        sum(segment_tiles(s, launch.queries, launch.keys, window, blocks) for s in segments)
        for launch, _, _ in passes
    ]
    flops = [
        2 * shape.head_dim * shape.query_heads * products * count * launch.queries * launch.keys
        for count, (launch, _, products) in zip(counts, passes, strict=True)
    ]
    cells = counts[0] * launches.forward.queries * launches.forward.keys
    pairs = sum(segment_pairs(s, window, blocks) for s in segments)
    tokens = sum(s.length * s.count for s in segments)
    value = shape.bytes_per_value * shape.head_dim
    # Query kernels read k and v per tile, key kernels q and the output's gradient.
    read = sum(count * rows for count, (_, rows, _) in zip(counts, passes, strict=True))
    outer = tokens * (2 + 4) * shape.query_heads + tokens * 4 * shape.key_heads
    return Cost(
        pairs=pairs,
        forward_tiles=counts[0],
        efficiency=pairs / cells if cells else 1.0,
        forward_flops=flops[0],
        backward_flops=sum(flops[1:]),
        bytes_moved=value * (2 * read * shape.query_heads + outer),
    )


def attention_limit(linear_parameters: int, layers: int, query_width: int, tokens: int) -> float:
    """How much faster a step over one causal sequence could be if attention were free (Amdahl).

    Counts products only: 2 per parameter and token against 4 layers width T / 2 per token.

    Args:
        linear_parameters: parameters that multiply every token, head included.
        layers: attention layers.
        query_width: query heads times head_dim.
        tokens: length of the sequence.
    """
    attention = 2.0 * layers * query_width * tokens
    return 1.0 + attention / (2.0 * linear_parameters)
