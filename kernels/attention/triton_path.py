"""Launches the attention kernels and joins them to autograd."""

import functools
import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from headrace.kernels.attention.launch import launches, padded
from headrace.kernels.attention.plan import Mask, Tile, key_tiles, query_tiles
from headrace.kernels.attention.triton_kernels import (
    attention_forward,
    attention_grad_kv,
    attention_grad_q,
)
from headrace.kernels.backend import architecture_of, readable

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31 - 1
# Row numbers are int32 and a tile may reach past the last row.
MOST_ROWS = 2**31 - 1024


class TritonAttention(torch.autograd.Function):
    """`[T, H, D]` tensors in, `[T, Hq, D]` out."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float
    ) -> torch.Tensor:
        """Run the forward kernel, keep what the backward ones need."""
        out, lse = run_forward(q, k, v, mask, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the backward kernels."""
        q, k, v, out, lse = ctx.saved_tensors
        return (*run_backward(q, k, v, out, lse, grad, ctx.mask, ctx.scale), None, None)


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float,
    visits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[T, Hq, D]` and log-sum-exp `[Hq, T]` in units of log 2.

    Args:
        q: `[T, Hq, D]`.
        k: `[T, Hkv, D]`.
        v: `[T, Hkv, D]`.
        mask: which rows see which keys.
        scale: factor of the scores.
        visits: `[tiles, Hq]` int32, filled with the inner blocks that each program visited.

    Raises:
        ValueError: too many rows, or no launch table for the device.
    """
    rows, heads, head_dim = q.shape
    if rows > MOST_ROWS:
        raise ValueError(f"{rows} rows in one pack; at most {MOST_ROWS}")
    architecture = architecture_of(q.device, attention_forward)
    launch = launches(architecture, q.dtype, head_dim).forward
    tiles, spans = _tables(mask, launch.queries, launch.keys, False, q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    out[mask.layout.end :].zero_()
    if not len(tiles):
        return out, lse
    q, k, v = (readable(tensor, architecture) for tensor in (q, k, v))
    target = out if out.dtype == q.dtype else out.to(q.dtype)
    attention_forward[len(tiles), heads](
        q, k, v, target, lse, tiles, spans, tiles if visits is None else visits,
        *_strides(q, k, v, target), lse.stride(0),
        scale * LOG2_E, NO_WINDOW if mask.window is None else mask.window,
        D=head_dim, BD=padded(head_dim), BM=launch.queries, BN=launch.keys,
        GROUP=heads // k.shape[1], COUNT=visits is not None,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return (out if target is out else target.to(out.dtype)), lse


def run_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    mask: Mask,
    scale: float,
    visits: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v.

    Args:
        q: `[T, Hq, D]`.
        k: `[T, Hkv, D]`.
        v: `[T, Hkv, D]`.
        out: `[T, Hq, D]`, what `run_forward` returned.
        lse: `[Hq, T]`, what `run_forward` returned.
        grad: `[T, Hq, D]`, gradient of the output, any strides.
        mask: which rows see which keys.
        scale: factor of the scores.
        visits: int32 `[query tiles, Hq]` and `[key tiles, Hkv]`, filled with the inner blocks that
            each program visited.
    """
    _, heads, head_dim = q.shape
    key_heads = k.shape[1]
    dtype = q.dtype
    architecture = architecture_of(q.device, attention_forward)
    table = launches(architecture, dtype, head_dim)
    q, k, v, out, grad = (readable(tensor, architecture) for tensor in (q, k, v, out, grad))
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    for tensor in (dq, dk, dv):
        tensor[mask.layout.end :].zero_()
    delta = torch.empty_like(lse)
    window = NO_WINDOW if mask.window is None else mask.window
    common = {"D": head_dim, "BD": padded(head_dim), "GROUP": heads // key_heads}

    launch = table.grad_q
    tiles, spans = _tables(mask, launch.queries, launch.keys, False, q.device)
    if not len(tiles):
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)
    attention_grad_q[len(tiles), heads](
        q, k, v, out, grad, dq, lse, delta, tiles, spans, tiles if visits is None else visits[0],
        *_strides(q, k, v, out, grad, dq), lse.stride(0), scale, scale * LOG2_E, window,
        BM=launch.queries, BN=launch.keys, COUNT=visits is not None, **common,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip

    for launch, grad_k, grad_v in table.key_passes():
        tiles, spans = _tables(mask, launch.keys, launch.queries, True, q.device)
        attention_grad_kv[len(tiles), key_heads](
            q, k, v, grad, dk, dv, lse, delta, tiles, spans,
            tiles if visits is None else visits[1],
            *_strides(q, k, v, grad, dk, dv), lse.stride(0), scale, scale * LOG2_E, window,
            BM=launch.queries, BN=launch.keys, GRAD_K=grad_k, GRAD_V=grad_v,
            COUNT=visits is not None, **common,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@functools.lru_cache(maxsize=64)
def _tables(
    mask: Mask, rows: int, inner: int, of_keys: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tile and span tables, int32 `[tiles, 4]` and `[spans, 3]`; the longest tiles come first."""
    tiles: list[Tile] = key_tiles(mask, rows) if of_keys else query_tiles(mask, rows)
    tiles.sort(key=lambda tile: tile.visits(inner), reverse=True)
    lines: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int]] = []
    for tile in tiles:
        lines.append((tile.start, tile.stop, len(spans), len(spans) + len(tile.spans)))
        spans += tile.spans
    return (
        torch.tensor(lines, dtype=torch.int32, device=device).reshape(-1, 4),
        torch.tensor(spans, dtype=torch.int32, device=device).reshape(-1, 3),
    )


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Row and head stride of each tensor."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]
