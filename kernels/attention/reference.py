"""Packed attention written like the mathematics: one mask, one softmax. Slow, quadratic, exact."""

import torch

from headrace.kernels.attention.plan import Mask


def attention_mask(mask_of: Mask, rows: int) -> torch.Tensor:
    """Which row attends to which: boolean `[rows, rows]`, queries down, keys across."""
    layout, selection, block_size = mask_of.layout, mask_of.selection, mask_of.block_size
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    block = 0
    for segment, (start, stop) in enumerate(zip(layout.starts, layout.stops, strict=True)):
        position = torch.arange(stop - start)
        own = position[:, None] >= position[None, :]
        if mask_of.window is not None:
            own &= position[:, None] - position[None, :] < mask_of.window
        if selection is not None:
            count = -(-(stop - start) // block_size)
            allowed = torch.zeros(count, count, dtype=torch.bool)
            for row in range(count):
                allowed[row, list(selection[block + row])] = True
            block += count
            number = position // block_size
            own &= allowed[number[:, None], number[None, :]]
        mask[start:stop, start:stop] = own
        first, last = layout.prefix_rows(segment)
        mask[start:stop, first:last] = True
    return mask


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax(scale q k^T) v over the keys that `mask` allows; rows that see nothing are zero.

    Args:
        q: `[T, Hq, D]`.
        k: `[T, Hkv, D]`.
        v: `[T, Hkv, D]`.
        mask: boolean `[T, T]`.
        scale: factor of the scores.

    Returns:
        `[T, Hq, D]` in q's dtype; computed in float32, or in float64 for float64 inputs.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    mask = mask.to(q.device)
    seen = mask.any(dim=1)
    # Rows and keys that nobody attends to may hold anything, NaN included: 0 * NaN must not leak.
    read = mask.any(dim=0)
    q = torch.where(seen[:, None, None], q, 0).to(compute)
    k = torch.where(read[:, None, None], k, 0).to(compute).repeat_interleave(group, dim=1)
    v = torch.where(read[:, None, None], v, 0).to(compute).repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    scores = scores.masked_fill(~seen[:, None], 0.0)
    weights = torch.softmax(scores, dim=-1).masked_fill(~mask, 0.0)
    return torch.einsum("hij,jhd->ihd", weights, v)
