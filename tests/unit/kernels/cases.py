"""Packs and random tensors that several kernel tests share."""

import itertools
import math
from collections.abc import Sequence

import torch

from headrace.kernels import linear_logprob


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


def head_inputs(
    rows: int, width: int, classes: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float64 hidden, weight, bias; targets with ignored rows; weights of the two results."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias, slopes = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, width), (classes, width), (classes,), (2, rows))
    )
    targets = torch.randint(0, classes, (rows,), generator=generator)
    targets[::3] = -100
    slopes[:, 1::4] = 0.0
    return hidden, weight / math.sqrt(width) * 3, bias, targets, slopes


def head_results(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    targets: torch.Tensor,
    slopes: torch.Tensor,
    backend: str,
    dtype: torch.dtype = torch.float64,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """Log-probability, entropy, and gradients of hidden, weight and bias of their weighted sums."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    result = linear_logprob(
        leaves[0], leaves[1], targets, bias=leaves[2], backend=backend, temperature=temperature
    )
    loss = (result.logprob * slopes[0]).sum() + (result.entropy * slopes[1]).sum()
    return (*result, *torch.autograd.grad(loss, leaves))
