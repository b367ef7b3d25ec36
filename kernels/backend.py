"""Which implementation computes an operation."""

import torch

from headrace.errors import ConfigError

BACKENDS = ("auto", "triton", "torch", "reference")


def choose_backend(backend: str, device: torch.device) -> str:
    """Resolve `"auto"` and refuse what cannot run.

    Returns:
        `"triton"`, `"torch"` or `"reference"`; `"auto"` is `"triton"` on a CUDA device and
        `"torch"` elsewhere.

    Raises:
        ValueError: the name is unknown, or `"torch"` was asked for off the CPU.
        ConfigError: `"triton"` was asked for and Triton is not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    chosen = backend
    if backend == "auto":
        chosen = "triton" if device.type == "cuda" else "torch"
    if chosen == "torch" and device.type != "cpu":
        raise ValueError(f'backend "torch" computes on the CPU; the tensors are on {device}')
    if chosen == "triton":
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                'backend "triton" needs the package triton (3.6 to 3.9): install headrace[gpu]'
            ) from error
    return chosen
