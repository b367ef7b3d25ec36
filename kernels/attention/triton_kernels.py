# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, D103, E741
# fmt: off
"""The attention kernels: forward, gradient of q, gradient of k and v.

Each program owns one tile of rows and walks a list of spans, so one loop body serves causal
segments, shared prefixes, windows and block-sparse selections. Every output element is written by
exactly one program and every sum has one order: no atomics.

A tile is `(first row, row after the last, first span, span after the last)`; a span is
`(first row, row after the last, causal)` of the other side. Scores are kept in units of log 2.
Row numbers are int32, addresses int64. Products pass `input_precision="ieee"`: float32 stays
float32. Masked loads read zeros, so nothing outside a span can reach a result.

Shapes: Q, O, DO, DQ `[T, Hq, D]`; K, V, DK, DV `[T, Hkv, D]`; LSE, DELTA `[Hq, T]`. The last
dimension is contiguous. BD is head_dim rounded up to a power of two.
"""

import triton
import triton.language as tl


@triton.jit
def attention_forward(
    Q, K, V, O, LSE, TILES, SPANS, VISITS,
    q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, lse_head,
    scale, window,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, COUNT: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(TILES + tile * 4)
    stop = tl.load(TILES + tile * 4 + 1)
    first = tl.load(TILES + tile * 4 + 2)
    last = tl.load(TILES + tile * 4 + 3)
    rows = start + tl.arange(0, BM)
    dims = tl.arange(0, BD)
    own = (rows < stop)[:, None] & (dims < D)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    wide_head = head.to(tl.int64)
    key_head = (head // GROUP).to(tl.int64)
    q = tl.load(Q + wide_rows * q_row + wide_head * q_head + dims[None, :], mask=own, other=0.0)
    K += key_head * k_head
    V += key_head * v_head

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    visits = 0
    for span in range(first, last):
        begin = tl.load(SPANS + span * 3)
        end = tl.load(SPANS + span * 3 + 1)
        causal = tl.load(SPANS + span * 3 + 2)
        above = tl.where(causal != 0, tl.minimum(rows + 1, end), end)
        below = tl.where(causal != 0, rows - window + 1, begin)
        for j in range(begin, end, BN):
            keys = j + tl.arange(0, BN)
            wide_keys = keys.to(tl.int64)
            inside = keys < end
            kt = tl.load(
                K + wide_keys[None, :] * k_row + dims[:, None],
                mask=inside[None, :] & (dims < D)[:, None],
                other=0.0,
            )
            s = tl.dot(q, kt, input_precision="ieee") * scale
            seen = (keys[None, :] < above[:, None]) & (keys[None, :] >= below[:, None])
            s = tl.where(seen, s, float("-inf"))
            highest = tl.maximum(top, tl.max(s, 1))
            # A row that has seen no key yet has no finite maximum to subtract.
            base = tl.where(highest == float("-inf"), 0.0, highest)
            p = tl.exp2(s - base[:, None])
            decay = tl.exp2(top - base)
            total = total * decay + tl.sum(p, 1)
            v = tl.load(
                V + wide_keys[:, None] * v_row + dims[None, :],
                mask=inside[:, None] & (dims < D)[None, :],
                other=0.0,
            )
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            top = highest
            visits += 1
    total = tl.where(rows < stop, total, 1.0)
    out = acc / total[:, None]
    tl.store(
        O + wide_rows * o_row + wide_head * o_head + dims[None, :],
        out.to(O.dtype.element_ty),
        mask=own,
    )
    tl.store(LSE + wide_head * lse_head + rows, top + tl.log2(total), mask=rows < stop)
    if COUNT:
        tl.store(VISITS + tile * tl.num_programs(1) + head, visits)


@triton.jit
def attention_grad_q(
    Q, K, V, O, DO, DQ, LSE, DELTA, TILES, SPANS, VISITS,
    q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, do_row, do_head,
    dq_row, dq_head, lse_head,
    scale, scale_log2, window,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, COUNT: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(TILES + tile * 4)
    stop = tl.load(TILES + tile * 4 + 1)
    first = tl.load(TILES + tile * 4 + 2)
    last = tl.load(TILES + tile * 4 + 3)
    rows = start + tl.arange(0, BM)
    dims = tl.arange(0, BD)
    live = rows < stop
    own = live[:, None] & (dims < D)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    wide_head = head.to(tl.int64)
    key_head = (head // GROUP).to(tl.int64)
    q = tl.load(Q + wide_rows * q_row + wide_head * q_head + dims[None, :], mask=own, other=0.0)
    o = tl.load(O + wide_rows * o_row + wide_head * o_head + dims[None, :], mask=own, other=0.0)
    do = tl.load(
        DO + wide_rows * do_row + wide_head * do_head + dims[None, :], mask=own, other=0.0
    )
    lse = tl.load(LSE + wide_head * lse_head + rows, mask=live, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # The gradient of k and v needs it too and runs after this kernel.
    tl.store(DELTA + wide_head * lse_head + rows, delta, mask=live)
    K += key_head * k_head
    V += key_head * v_head

    dq = tl.zeros([BM, BD], tl.float32)
    visits = 0
    for span in range(first, last):
        begin = tl.load(SPANS + span * 3)
        end = tl.load(SPANS + span * 3 + 1)
        causal = tl.load(SPANS + span * 3 + 2)
        above = tl.where(causal != 0, tl.minimum(rows + 1, end), end)
        below = tl.where(causal != 0, rows - window + 1, begin)
        for j in range(begin, end, BN):
            keys = j + tl.arange(0, BN)
            wide_keys = keys.to(tl.int64)
            valid = (keys < end)[:, None] & (dims < D)[None, :]
            k = tl.load(K + wide_keys[:, None] * k_row + dims[None, :], mask=valid, other=0.0)
            v = tl.load(V + wide_keys[:, None] * v_row + dims[None, :], mask=valid, other=0.0)
            if Q.dtype.element_ty == tl.float32:
                # Read again: kept as operands of float32 products, both would fill the registers.
                q = tl.load(
                    Q + wide_rows * q_row + wide_head * q_head + dims[None, :], mask=own, other=0.0
                )
                do = tl.load(
                    DO + wide_rows * do_row + wide_head * do_head + dims[None, :],
                    mask=own, other=0.0,
                )
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            seen = (keys[None, :] < above[:, None]) & (keys[None, :] >= below[:, None])
            p = tl.exp2(tl.where(seen, s - lse[:, None], float("-inf")))
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
            visits += 1
    tl.store(
        DQ + wide_rows * dq_row + wide_head * dq_head + dims[None, :],
        (dq * scale).to(DQ.dtype.element_ty),
        mask=own,
    )
    if COUNT:
        tl.store(VISITS + tile * tl.num_programs(1) + head, visits)


@triton.jit
def attention_grad_kv(
    Q, K, V, DO, DK, DV, LSE, DELTA, TILES, SPANS, VISITS,
    q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head, dk_row, dk_head,
    dv_row, dv_head, lse_head,
    scale, scale_log2, window,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, GRAD_K: tl.constexpr, GRAD_V: tl.constexpr, COUNT: tl.constexpr,
):
    """Tiles are keys and spans are queries here; all scores are transposed, `[BN, BM]`."""
    tile = tl.program_id(0)
    key_head = tl.program_id(1)
    start = tl.load(TILES + tile * 4)
    stop = tl.load(TILES + tile * 4 + 1)
    first = tl.load(TILES + tile * 4 + 2)
    last = tl.load(TILES + tile * 4 + 3)
    keys = start + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    own = (keys < stop)[:, None] & (dims < D)[None, :]
    wide_keys = keys.to(tl.int64)[:, None]
    wide_head = key_head.to(tl.int64)
    k = tl.load(K + wide_keys * k_row + wide_head * k_head + dims[None, :], mask=own, other=0.0)
    if GRAD_K:
        v = tl.load(V + wide_keys * v_row + wide_head * v_head + dims[None, :],
                    mask=own, other=0.0)
        dk = tl.zeros([BN, BD], tl.float32)
    if GRAD_V:
        dv = tl.zeros([BN, BD], tl.float32)
    visits = 0
    for member in range(GROUP):
        head = wide_head * GROUP + member
        for span in range(first, last):
            begin = tl.load(SPANS + span * 3)
            end = tl.load(SPANS + span * 3 + 1)
            causal = tl.load(SPANS + span * 3 + 2)
            # Row r sees key j if r >= j and r < j + window; a prefix is seen by the whole span.
            earliest = tl.where(causal != 0, keys, begin)
            reach = tl.where(causal != 0, tl.minimum(end - keys, window), end - keys)
            for i in range(begin, end, BM):
                rows = i + tl.arange(0, BM)
                live = rows < end
                wide_rows = rows.to(tl.int64)[:, None]
                valid = live[:, None] & (dims < D)[None, :]
                q = tl.load(Q + wide_rows * q_row + head * q_head + dims[None, :],
                            mask=valid, other=0.0)
                do = tl.load(DO + wide_rows * do_row + head * do_head + dims[None, :],
                             mask=valid, other=0.0)
                lse = tl.load(LSE + head * lse_head + rows, mask=live, other=0.0)
                s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2
                seen = (rows[None, :] >= earliest[:, None]) & (
                    rows[None, :] - keys[:, None] < reach[:, None]
                )
                p = tl.exp2(tl.where(seen, s - lse[None, :], float("-inf")))
                if GRAD_V:
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
                if GRAD_K:
                    delta = tl.load(DELTA + head * lse_head + rows, mask=live, other=0.0)
                    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
                    ds = p * (dp - delta[None, :])
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
                visits += 1
    if GRAD_K:
        tl.store(DK + wide_keys * dk_row + wide_head * dk_head + dims[None, :],
                 (dk * scale).to(DK.dtype.element_ty), mask=own)
    if GRAD_V:
        tl.store(DV + wide_keys * dv_row + wide_head * dv_head + dims[None, :],
                 dv.to(DV.dtype.element_ty), mask=own)
    if COUNT:
        tl.store(VISITS + tile * tl.num_programs(1) + key_head, visits)
