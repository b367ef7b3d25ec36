"""AdamW on float32 masters of a model whose own parameters are the rounded, published weights.

The forward and backward run through the rounded parameters, because that is what the sampler runs;
the masters collect the updates that are smaller than a rounding step. Gradients are summed over
micro-batches in float32, in the order of the micro-batches.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from headrace.config import Learner
from headrace.errors import TrainingError

KEYS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter: updates taken, first and second moment."""


class MasterAdamW:
    """One optimizer step for any number of backward passes.

    Attributes:
        masters: float32 master of every trained parameter, by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter], config: Learner) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self.masters: dict[str, Tensor] = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in self._parameters.items()
        }
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _collect(self.masters[name])
            )
        matrices = [master for master in self.masters.values() if master.dim() > 1]
        vectors = [master for master in self.masters.values() if master.dim() <= 1]
        self._adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                # decaying norms and biases towards 0 is no regularisation
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            fused=True,
        )

    def step(self, step: int, count: int) -> float:
        """Apply the collected gradients and round the masters into the model.

        Args:
            step: number of this optimizer step, from 1; sets the warm-up.
            count: trained tokens of the batch, by which the summed loss is divided.

        Returns:
            Norm of the averaged gradient, before clipping.

        Raises:
            TrainingError: the gradient is not finite; nothing was changed.
        """
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        norm = float(norms.norm()) / count
        if not math.isfinite(norm):
            self.discard()
            raise TrainingError(f"the gradient norm of step {step} is {norm}")
        clip = min(1.0, self._config.clip_grad / (norm + 1e-6))
        torch._foreach_mul_(gradients, clip / count)
        warmup = min(1.0, step / self._config.warmup_steps) if self._config.warmup_steps else 1.0
        for group in self._adam.param_groups:
            group["lr"] = self._config.lr * warmup
        self._adam.step()
        self.discard()
        self.round()
        return norm

    def discard(self) -> None:
        """Forget collected gradients."""
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Write the masters, rounded to nearest even, into the model's parameters."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """AdamW's own tensors, as `name.<key>` for each of `KEYS`; none before the first step."""
        return {
            f"{name}.{key}": self._adam.state[master][key]
            for name, master in self.masters.items()
            if master in self._adam.state
            for key in KEYS
        }

    def state_shapes(self) -> dict[str, Tensor]:
        """Tensors of the shapes and dtypes that `state` may hold."""
        scalar = torch.zeros((), dtype=torch.float32)
        return {
            f"{name}.{key}": scalar if key == "step" else master
            for name, master in self.masters.items()
            for key in KEYS
        }

    @torch.no_grad()
    def restore(self, masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Take over stored masters and what `state` gave; names and shapes already agree."""
        for name, master in self.masters.items():
            master.copy_(masters[name])
            if f"{name}.step" in state:
                self._adam.state[master] = {
                    key: state[f"{name}.{key}"].to(master.device, copy=True) for key in KEYS
                }
        self.round()


def _collect(master: Tensor) -> Callable[[Tensor], None]:
    """Hook that moves a parameter's gradient into its master's, in float32."""

    def collect(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient
        parameter.grad = None

    return collect
