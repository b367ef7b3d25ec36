# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, D103
# fmt: off
"""The head's kernels: a product with the vocabulary whose logits never leave the program.

`logprob_fold` folds one stretch of the vocabulary into running statistics per row, `logit_gradient`
turns one tile of logits into its gradient. Sums are float32, orders are fixed, nothing is atomic.

Shapes: H `[N, K]`, W `[V, K]`, B `[V]` float32, Y `[N]` int64, statistics `[stretches, N]`,
DZ `[N, chunk]`, DB `[row tiles, chunk]`.
"""

import triton
import triton.language as tl


@triton.jit
def logprob_fold(
    H, W, B, Y, TOP, TOTAL, MOMENT, PICKED,
    h_row, w_row, row_count, class_count, column_count, width, inverse_temperature,
    BR: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    stretch = tl.program_id(1)
    live = rows < row_count
    y = tl.load(Y + rows, mask=live, other=-1)
    wide_rows = rows.to(tl.int64)[:, None]
    top = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    moment = tl.zeros([BR], tl.float32)
    picked = tl.zeros([BR], tl.float32)
    begin = stretch * width
    end = tl.minimum(begin + width, class_count)
    for v in range(begin, end, BV):
        classes = v + tl.arange(0, BV)
        inside = classes < end
        wide_classes = classes.to(tl.int64)[None, :]
        z = tl.zeros([BR, BV], tl.float32)
        for c in range(0, column_count, BK):
            columns = c + tl.arange(0, BK)
            h = tl.load(
                H + wide_rows * h_row + columns[None, :],
                mask=live[:, None] & (columns < column_count)[None, :], other=0.0,
            )
            w = tl.load(
                W + wide_classes * w_row + columns[:, None],
                mask=inside[None, :] & (columns < column_count)[:, None], other=0.0,
            )
            z = tl.dot(h, w, z, input_precision="ieee")
        if BIAS:
            z += tl.load(B + classes, mask=inside, other=0.0)[None, :]
        z *= inverse_temperature
        picked += tl.sum(tl.where(classes[None, :] == y[:, None], z, 0.0), 1)
        highest = tl.maximum(top, tl.max(tl.where(inside[None, :], z, float("-inf")), 1))
        z = tl.where(inside[None, :], z - highest[:, None], -1e30)
        e = tl.exp(z)
        # Nothing was folded before the first tile: any finite drop does, total and moment are 0.
        drop = tl.maximum(top - highest, -1e30)
        decay = tl.exp(drop)
        moment = (moment + drop * total) * decay + tl.sum(z * e, 1)
        total = total * decay + tl.sum(e, 1)
        top = highest
    place = stretch.to(tl.int64) * row_count + rows
    tl.store(TOP + place, top, mask=live)
    tl.store(TOTAL + place, total, mask=live)
    tl.store(MOMENT + place, moment, mask=live)
    tl.store(PICKED + place, picked, mask=live)


@triton.jit
def logit_gradient(
    H, W, B, Y, LSE, ENTROPY, SLOPE, CURVE, DZ, DB,
    h_row, w_row, dz_row, row_count, class_count, column_count, first_class, inverse_temperature,
    BR: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):
    """W, B and class_count are those of the chunk, whose first class is `first_class`."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    classes = tl.program_id(1) * BV + tl.arange(0, BV)
    live = rows < row_count
    inside = classes < class_count
    wide_rows = rows.to(tl.int64)[:, None]
    wide_classes = classes.to(tl.int64)[None, :]
    z = tl.zeros([BR, BV], tl.float32)
    for c in range(0, column_count, BK):
        columns = c + tl.arange(0, BK)
        h = tl.load(
            H + wide_rows * h_row + columns[None, :],
            mask=live[:, None] & (columns < column_count)[None, :], other=0.0,
        )
        w = tl.load(
            W + wide_classes * w_row + columns[:, None],
            mask=inside[None, :] & (columns < column_count)[:, None], other=0.0,
        )
        z = tl.dot(h, w, z, input_precision="ieee")
    if BIAS:
        z += tl.load(B + classes, mask=inside, other=0.0)[None, :]
    y = tl.load(Y + rows, mask=live, other=-1)
    lse = tl.load(LSE + rows, mask=live, other=0.0)
    entropy = tl.load(ENTROPY + rows, mask=live, other=0.0)
    slope = tl.load(SLOPE + rows, mask=live, other=0.0)
    curve = tl.load(CURVE + rows, mask=live, other=0.0)
    whole = live[:, None] & inside[None, :]
    logp = tl.where(whole, z * inverse_temperature - lse[:, None], -1e30)
    p = tl.exp(logp)
    hit = (classes[None, :] + first_class) == y[:, None]
    # The target's p - 1 is formed in float32, before any rounding of the stored gradient.
    dz = tl.where(hit, slope[:, None], 0.0) - p * (
        slope[:, None] + curve[:, None] * (logp + entropy[:, None])
    )
    dz = tl.where(whole, dz, 0.0)
    tl.store(DZ + wide_rows * dz_row + wide_classes, dz.to(DZ.dtype.element_ty), mask=whole)
    if BIAS:
        place = tl.program_id(0).to(tl.int64) * class_count + classes
        tl.store(DB + place, tl.sum(dz, 0), mask=inside)
