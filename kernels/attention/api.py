"""`packed_attention`: attention over sequences laid end to end."""

import math

import torch

from headrace.kernels.attention.layout import Blocks, Layout, read_blocks, read_layout
from headrace.kernels.attention.plan import Mask
from headrace.kernels.attention.reference import attention_mask, reference_attention
from headrace.kernels.attention.torch_path import TorchAttention
from headrace.kernels.backend import choose_backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    prefix_of: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    blocks: Blocks | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Causal grouped-query attention within segments, with shared prefixes.

    Row i of segment s attends to rows j <= i of s, and to every row of the segment that
    `prefix_of[s]` names. Boundaries are what `cu_seqlens` says and are never inferred.
    Deterministic to the bit; a segment's result does not depend on where it lies in the pack.

    Args:
        q: queries `[T, Hq, D]`, D from 16 to 256; float32, bfloat16 or float16 (float64 too on
            the CPU backends). Any strides.
        k: keys `[T, Hkv, D]`; Hkv divides Hq, and query head h reads key head h * Hkv // Hq.
        v: values `[T, Hkv, D]`.
        cu_seqlens: `[B + 1]` integer boundaries from 0, ascending; rows beyond the last belong
            to nobody: their output and gradients are zero. Keep it on the host to save a
            synchronisation.
        prefix_of: `[B]` integer; the segment that is this one's shared prefix, or -1. A prefix
            has no prefix itself.
        scale: factor of the scores; `1 / sqrt(D)` by default.
        window: sliding window in tokens: a row sees itself and the `window - 1` rows before it
            in its own segment. The shared prefix is always seen in full.
        blocks: block-sparse selection within segments, see `Blocks`.
        backend: `"triton"`, `"torch"`, `"reference"`, or `"auto"`: triton on a GPU, torch on
            a CPU.

    Returns:
        `[T, Hq, D]` in q's dtype.

    Raises:
        ValueError: shapes, dtypes, boundaries, prefixes, window or blocks do not fit.
        ConfigError: the backend is not available.
    """
    chosen = choose_backend(backend, q.device)
    _check_tensors(q, k, v, chosen)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a row sees at least itself, so it must be >= 1")
    layout = read_layout(cu_seqlens, prefix_of, q.shape[0])
    mask = _mask(layout, window, blocks)
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    if chosen == "reference":
        return reference_attention(q, k, v, attention_mask(mask, q.shape[0]), factor).to(q.dtype)
    function: type[torch.autograd.Function] = TorchAttention
    if chosen == "triton":
        from headrace.kernels.attention.triton_path import TritonAttention

        function = TritonAttention
    out: torch.Tensor = function.apply(q, k, v, mask, factor)  # type: ignore[no-untyped-call]
    return out


def _mask(layout: Layout, window: int | None, blocks: Blocks | None) -> Mask:
    longest = max((b - a for a, b in zip(layout.starts, layout.stops, strict=True)), default=0)
    if window is not None and window >= longest:
        window = None
    if blocks is None:
        return Mask(layout, window)
    return Mask(layout, window, blocks.size, read_blocks(blocks, layout))


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise ValueError(
            "q must be [T, Hq, D] and k, v [T, Hkv, D]; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[2] != k.shape[2] or not 16 <= q.shape[2] <= 256:
        raise ValueError(
            f"head_dim is {q.shape[2]} for q and {k.shape[2]} for k; one value from 16 to 256"
        )
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    allowed = DTYPES if backend == "triton" else (*DTYPES, torch.float64)
    if q.dtype not in allowed or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k, v must share one of {', '.join(str(d) for d in allowed)}; "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k, v lie on {q.device}, {k.device}, {v.device}; one device")
