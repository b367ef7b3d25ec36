"""`linear_logprob`: from hidden states to log-probabilities without the logits matrix."""

from typing import NamedTuple

import torch

from headrace.kernels.backend import choose_backend
from headrace.kernels.logprob.reference import reference_logprob
from headrace.kernels.logprob.torch_path import TorchLogProb

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LogProbs(NamedTuple):
    """What `linear_logprob` returns, one value per row.

    Attributes:
        logprob: `[N]`, natural log-probability of the target; at most 0.
        entropy: `[N]`, entropy of the distribution in nats; from 0 to ln V.
    """

    logprob: torch.Tensor
    entropy: torch.Tensor


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    backend: str = "auto",
) -> LogProbs:
    """Log-probability of each target and entropy of its distribution, never holding `[N, V]`.

    The distribution is softmax((hidden weight^T + bias) / temperature). Both results carry
    gradients to hidden, weight and bias; sums are float32.

    Args:
        hidden: `[N, K]`, float32, bfloat16 or float16 (float64 too on the CPU backends).
        weight: `[V, K]`, same dtype.
        targets: `[N]`, integer: a class from 0 to V - 1, or `ignore_index`.
        bias: `[V]`, same dtype, or None. Minus infinity excludes a class.
        temperature: divisor of the logits, above 0.
        ignore_index: target value of rows whose results and gradients are exactly zero.
        backend: `"triton"`, `"torch"`, `"reference"`, or `"auto"`: triton on a GPU, torch on
            a CPU.

    Returns:
        `LogProbs`, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes, temperature or a target do not fit.
        ConfigError: the backend is not available.
    """
    chosen = choose_backend(backend, hidden.device)
    _check(hidden, weight, targets, bias, chosen)
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    counted = _counted(targets, weight.shape[0], ignore_index)
    if chosen == "reference":
        return LogProbs(
            *reference_logprob(hidden, weight, targets, bias, temperature, ignore_index)
        )
    if counted is None:
        return LogProbs(*_compute(chosen, hidden, weight, bias, targets, temperature))
    # Ignored rows never enter the computation, so nothing they hold can reach a result.
    part = _compute(
        chosen, hidden.index_select(0, counted), weight, bias, targets[counted], temperature
    )
    zero = part[0].new_zeros(targets.shape[0])
    return LogProbs(*(zero.index_copy(0, counted, values) for values in part))


def _compute(
    backend: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    function: type[torch.autograd.Function] = TorchLogProb
    if backend == "triton":
        from headrace.kernels.logprob.triton_path import TritonLogProb

        function = TritonLogProb
    results: tuple[torch.Tensor, torch.Tensor] = function.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets.long(), temperature
    )
    return results


def _counted(targets: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor | None:
    """Rows that are not ignored, or None for all; refuses targets that are no class."""
    ignored = targets == ignore_index
    wrong = ((targets < 0) | (targets >= classes)) & ~ignored
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"targets[{row}] is {int(targets[row])}; a class from 0 to {classes - 1} "
            f"or {ignore_index} (ignored)"
        )
    return (~ignored).nonzero()[:, 0] if ignored.any() else None


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [N, K] and weight [V, K]; "
            f"got {list(hidden.shape)}, {list(weight.shape)}"
        )
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"weight is {list(weight.shape)}; it needs at least one class and column")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [{hidden.shape[0]}]; got {list(targets.shape)}")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be integers; got {targets.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}]; got {list(bias.shape)}")
    allowed = DTYPES if backend == "triton" else (*DTYPES, torch.float64)
    dtypes = [tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None]
    if hidden.dtype not in allowed or len(set(dtypes)) > 1:
        raise ValueError(
            f"hidden, weight and bias must share one of {', '.join(str(d) for d in allowed)}; "
            f"got {', '.join(str(d) for d in dtypes)}"
        )
    devices = {tensor.device for tensor in (hidden, weight, targets)}
    if len(devices) > 1:
        raise ValueError(f"tensors lie on {', '.join(sorted(str(d) for d in devices))}; one device")
