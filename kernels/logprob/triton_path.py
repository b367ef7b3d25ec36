"""Launches the head's kernels and joins them to autograd.

The forward pass keeps four numbers per row and stretch of the vocabulary. The backward pass holds
one chunk of logit gradients, at most `ROWS x CHUNK` in the inputs' dtype, and leaves the two
products with it to the library. Stretch and chunk are constants, so a row's result depends neither
on how many rows there are nor on the device.
"""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from headrace.kernels.backend import architecture_of, readable
from headrace.kernels.logprob.launch import launches
from headrace.kernels.logprob.triton_kernels import logit_gradient, logprob_fold

STRETCH = 8192
CHUNK = 8192
ROWS = 16384
LOWEST = -1e30


class TritonLogProb(torch.autograd.Function):
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
        """Fold the vocabulary stretch by stretch, then merge the stretches in order."""
        architecture = architecture_of(hidden.device, logprob_fold)
        launch = launches(architecture, hidden.dtype).fold
        h, w = readable(hidden, architecture), readable(weight, architecture)
        shift = None if bias is None else bias.float().clamp(min=LOWEST)
        rows, width = h.shape
        classes = w.shape[0]
        stretches = -(-classes // STRETCH)
        top, total, moment, picked = (
            torch.empty(stretches, rows, dtype=torch.float32, device=h.device) for _ in range(4)
        )
        if rows:
            logprob_fold[-(-rows // launch.rows), stretches](
                h, w, h if shift is None else shift, targets.contiguous(),
                top, total, moment, picked, h.stride(0), w.stride(0), rows, classes, width,
                STRETCH, 1.0 / temperature, BR=launch.rows, BV=launch.classes, BK=launch.depth,
                BIAS=shift is not None, num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip
        highest = top.amax(dim=0)
        drop = top - highest
        decay = drop.exp()
        moment = ((moment + drop * total) * decay).sum(dim=0)
        total = (total * decay).sum(dim=0)
        log_total = total.log()
        logprob = picked.sum(dim=0) - highest - log_total
        entropy = (log_total - moment / total).clamp(0.0, math.log(classes))
        ctx.save_for_backward(hidden, weight, bias, targets, highest + log_total, entropy)
        ctx.temperature = temperature
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Recompute a chunk of logits as its own gradient, multiply twice, go on."""
        hidden, weight, bias, _, lse, _ = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        classes = weight.shape[0]
        dh = torch.zeros(hidden.shape, dtype=torch.float32, device=lse.device)
        dw = weight.new_empty(weight.shape) if need_weight else None
        db = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        slopes = (grad_logprob / ctx.temperature, grad_entropy / ctx.temperature)
        for v0 in range(0, classes, CHUNK):
            v = slice(v0, min(v0 + CHUNK, classes))
            part = None
            for r0 in range(0, hidden.shape[0], ROWS):
                r = slice(r0, r0 + ROWS)
                dz, sums = _logit_gradient(ctx, r, v, slopes)
                if need_hidden:
                    dh[r] += _product(dz, weight[v])
                if need_weight:
                    piece = _product(dz.T, hidden[r])
                    part = piece if part is None else part.add_(piece)
                if db is not None:
                    db[v] += sums
            if dw is not None:
                dw[v] = 0.0 if part is None else part
        return (
            dh.to(hidden.dtype) if need_hidden else None,
            dw,
            db.to(bias.dtype) if db is not None and need_bias else None,
            None,
            None,
        )


def _logit_gradient(
    ctx: Any, r: slice, v: slice, slopes: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the logits `[rows, classes]` of a chunk, and its float32 sums over the rows."""
    hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
    architecture = architecture_of(hidden.device, logit_gradient)
    launch = launches(architecture, hidden.dtype).gradient
    h, w = readable(hidden[r], architecture), readable(weight[v], architecture)
    rows, width = h.shape
    classes = w.shape[0]
    shift = None if bias is None else bias[v].float().clamp(min=LOWEST)
    tiles = -(-rows // launch.rows)
    dz = torch.empty(rows, classes, dtype=h.dtype, device=h.device)
    sums = torch.empty(tiles, 0 if shift is None else classes, device=h.device)
    logit_gradient[tiles, -(-classes // launch.classes)](
        h, w, h if shift is None else shift, targets[r].contiguous(), lse[r], entropy[r],
        slopes[0][r], slopes[1][r], dz, sums,
        h.stride(0), w.stride(0), dz.stride(0), rows, classes, width, v.start,
        1.0 / ctx.temperature, BR=launch.rows, BV=launch.classes, BK=launch.depth,
        BIAS=shift is not None, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return dz, sums.sum(dim=0)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product with a float32 sum and a float32 result."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())
