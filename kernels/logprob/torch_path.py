"""Log-probability and entropy on the CPU, one tile of logits at a time.

The vocabulary is the outer loop and the rows the inner one, so that a stretch of the weight is
read and its gradient finished once. The backward pass recomputes each tile of logits and turns it
into its gradient in place. Never more than one `ROWS x VOCABULARY` tile of logits exists, and one
stretch of bfloat16 gradients for at most `ROWS_AT_ONCE` rows.

With z the scaled logits, p the softmax, H the entropy, and g the incoming gradients:
    H = log s - a / s          with s = sum e^(z-m), a = sum (z-m) e^(z-m), m = max z
    dz = g_lp (1[y] - p) - g_H p (log p + H)
"""

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

ROWS = 1024
ROWS_AT_ONCE = 16384
VOCABULARY = 2048
# A logit of minus infinity has probability zero; a finite stand-in keeps 0 * inf out of sums.
LOWEST = -1e30

_precision_lock = threading.RLock()


class TorchLogProb(torch.autograd.Function):
    """`hidden [N, K], weight [V, K], targets [N]` in, two `[N]` tensors out; no row is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fold tiles of logits into running maxima and sums."""
        compute = torch.promote_types(hidden.dtype, torch.float32)
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        wide = hidden.to(compute)
        top = torch.full((rows,), -math.inf, dtype=compute)
        total, moment, at_target = (torch.zeros(rows, dtype=compute) for _ in range(3))
        with _products(hidden.dtype):
            for v0, v1, part, shift in _stretches(weight, bias, compute):
                for r0 in range(0, rows, ROWS):
                    r = slice(r0, r0 + ROWS)
                    z = _logits(wide[r], part, shift, temperature)
                    y = targets[r] - v0
                    inside = (y >= 0) & (y < v1 - v0)
                    picked = z.gather(1, y.clamp(0, v1 - v0 - 1)[:, None])[:, 0]
                    at_target[r] = torch.where(inside, picked, at_target[r])
                    highest = torch.maximum(top[r], z.amax(dim=1))
                    z.sub_(highest[:, None])
                    e = z.exp()
                    decay = torch.exp(top[r] - highest)
                    # The first tile has nothing to decay: -inf - highest, times zero.
                    drop = (top[r] - highest).clamp(min=LOWEST)
                    moment[r] = (moment[r] + drop * total[r]) * decay + z.mul_(e).sum(dim=1)
                    total[r] = total[r] * decay + e.sum(dim=1)
                    top[r] = highest
        log_total = total.log()
        logprob = at_target - top - log_total
        entropy = (log_total - moment / total).clamp(0.0, math.log(vocabulary))
        ctx.save_for_backward(hidden, weight, bias, targets, top + log_total, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Recompute each tile of logits, make it its own gradient, multiply twice."""
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        compute = lse.dtype
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows = hidden.shape[0]
        wide = hidden.to(compute)
        inverse = 1.0 / ctx.temperature
        slope = (torch.zeros_like(lse) if grad_logprob is None else grad_logprob) * inverse
        curve = None if grad_entropy is None else grad_entropy * inverse
        dh = torch.zeros_like(wide) if need_hidden else None
        dw = (
            torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else None
        )
        db = torch.zeros(weight.shape[0], dtype=compute) if need_bias else None
        # Over all rows at once, a bfloat16 product rounds each sum once, as it must be in the end,
        # and is twice as fast as one with a float32 result.
        at_once = 0 < rows <= ROWS_AT_ONCE and hidden.dtype == torch.bfloat16
        stored = hidden.new_empty(rows if at_once else 0, VOCABULARY)
        with _products(hidden.dtype):
            for v0, v1, part, shift in _stretches(weight, bias, compute):
                dpart = torch.zeros_like(part) if need_weight and not at_once else None
                for r0 in range(0, rows, ROWS):
                    r = slice(r0, r0 + ROWS)
                    z = _logits(wide[r], part, shift, ctx.temperature).sub_(lse[r][:, None])
                    bend = None if curve is None else (curve[r], entropy[r])
                    dz = _logit_gradient(z, slope[r], bend)
                    y = targets[r] - v0
                    inside = ((y >= 0) & (y < v1 - v0)).nonzero()[:, 0]
                    dz[inside, y[inside]] += slope[r][inside]
                    if dh is not None:
                        dh[r].addmm_(dz, part)
                    if dpart is not None:
                        dpart.addmm_(dz.T, wide[r])
                    if at_once:
                        stored[r, : v1 - v0] = dz
                    if db is not None:
                        db[v0:v1] += dz.sum(dim=0)
                if dw is not None:
                    dw[v0:v1] = stored[:, : v1 - v0].T @ hidden if dpart is None else dpart
        return (
            None if dh is None else dh.to(hidden.dtype),
            dw,
            None if db is None else db.to(bias.dtype),
            None,
            None,
        )


def _stretches(
    weight: torch.Tensor, bias: torch.Tensor | None, compute: torch.dtype
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor | None]]:
    for v0 in range(0, weight.shape[0], VOCABULARY):
        v1 = min(v0 + VOCABULARY, weight.shape[0])
        shift = None if bias is None else bias[v0:v1].to(compute).clamp(min=LOWEST)
        yield v0, v1, weight[v0:v1].to(compute), shift


def _logits(
    hidden: torch.Tensor, part: torch.Tensor, shift: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    z = hidden @ part.T if shift is None else torch.addmm(shift, hidden, part.T)
    return z if temperature == 1.0 else z.mul_(1.0 / temperature)


def _logit_gradient(
    logprobs: torch.Tensor,
    slope: torch.Tensor,
    bend: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Turn log p into -p (g_lp + g_H (log p + H)), all but the target's own term, in place."""
    if bend is None:
        return logprobs.exp_().mul_(-slope[:, None])
    curve, entropy = bend
    p = logprobs.exp()
    constant = -(slope + curve * entropy)
    return logprobs.mul_(-curve[:, None]).add_(constant[:, None]).mul_(p)


@contextlib.contextmanager
def _products(dtype: torch.dtype) -> Iterator[None]:
    """Let float32 products round their factors to bfloat16 while the inputs are bfloat16.

    PyTorch has no CPU product of bfloat16 factors with a float32 result. Under this setting
    oneDNN multiplies float32 tensors with the bfloat16 unit and sums in float32: exact for
    logits, whose factors are bfloat16 already. The setting is the process's, hence the lock.
    """
    if dtype != torch.bfloat16:
        yield
        return
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _precision_lock:
        before = setting.fp32_precision
        setting.fp32_precision = "bf16"
        try:
            yield
        finally:
            setting.fp32_precision = before
