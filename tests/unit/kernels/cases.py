"""Packs and random tensors that several kernel tests share."""

import itertools
from collections.abc import Sequence

import torch


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64)


def attention_inputs(
    rows: int, query_heads: int, key_heads: int, head_dim: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float64 q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, head_dim) for heads in (query_heads, key_heads, key_heads, query_heads)]
    q, k, v, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return q, k, v, grad


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth (over 1 where the truth is below 1)."""
    value, truth = value.detach().double(), truth.detach().double()
    difference = float((value - truth).norm())
    return difference / max(float(truth.norm()), 1.0)
