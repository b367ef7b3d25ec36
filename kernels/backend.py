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


def interpreted(kernel: object) -> bool:
    """Whether Triton's interpreter runs this kernel; Triton decides that when it is imported."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernel, InterpretedFunction)


def architecture_of(device: torch.device, kernel: object) -> str:
    """The launch table's name for where a kernel runs: `"interpreter"`, `"sm_90"`, `"gfx942"`.

    Raises:
        ConfigError: the tensors are on the CPU and the kernel is not interpreted.
    """
    if interpreted(kernel):
        return "interpreter"
    if device.type == "cpu":
        raise ConfigError(
            "Triton kernels run on CPU tensors only under Triton's interpreter: start the process "
            'with TRITON_INTERPRET=1, or use backend "torch"'
        )
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def readable(tensor: torch.Tensor, architecture: str) -> torch.Tensor:
    """The tensor as kernels can read it: with a contiguous last dimension.

    Triton's interpreter computes on the bits of bfloat16 as if they were integers, so there
    bfloat16 is widened; what interpretation checks is float32 and float16.
    """
    if architecture == "interpreter" and tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
