"""Log-probability and entropy written like the mathematics, with the full logits matrix."""

import torch


def reference_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of `(hidden weight^T + bias) / temperature` at the targets, and its entropy.

    Args:
        hidden: `[N, K]`.
        weight: `[V, K]`.
        targets: `[N]`.
        bias: `[V]` or None.
        temperature: divisor of the logits.
        ignore_index: target value of rows that count for nothing.

    Returns:
        Two `[N]` tensors, float32 or, for float64 inputs, float64.
    """
    compute = torch.promote_types(hidden.dtype, torch.float32)
    counted = targets != ignore_index
    hidden = torch.where(counted[:, None], hidden, 0).to(compute)
    logits = hidden @ weight.to(compute).T
    if bias is not None:
        logits = logits + bias.to(compute)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    at_target = logprobs.gather(1, torch.where(counted, targets, 0)[:, None].long())[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return torch.where(counted, at_target, 0), torch.where(counted, entropy, 0)
