"""How the head's kernels are launched: data, chosen by architecture and dtype.

Every row was compiled ahead of time for its architecture and neither spills nor exceeds its shared
memory (`headrace.kernels.aot`); no row was tuned by timing.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """One kernel's configuration.

    Attributes:
        rows: rows of hidden states per tile.
        classes: classes per tile.
        depth: columns of one step of the inner product.
        warps: warps per program.
        stages: depth of the software pipeline.
    """

    rows: int
    classes: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Launches:
    """The configurations of one operation.

    Attributes:
        fold: statistics of the logits.
        gradient: gradient of the logits.
    """

    fold: Launch
    gradient: Launch


_NARROW = Launches(Launch(128, 128, 64, 8, 3), Launch(128, 128, 64, 8, 3))
_FLOAT32 = Launches(Launch(64, 64, 32, 8, 1), Launch(64, 64, 32, 8, 1))
_FLOAT32_SM100 = Launches(Launch(64, 32, 32, 8, 1), Launch(64, 64, 32, 8, 1))
INTERPRETED = Launches(Launch(32, 64, 32, 1, 1), Launch(32, 64, 32, 1, 1))

TABLE: dict[tuple[str, torch.dtype], Launches] = {
    ("sm_90", torch.bfloat16): _NARROW,
    ("sm_90", torch.float16): _NARROW,
    ("sm_90", torch.float32): _FLOAT32,
    ("sm_100", torch.bfloat16): _NARROW,
    ("sm_100", torch.float16): _NARROW,
    ("sm_100", torch.float32): _FLOAT32_SM100,
    ("gfx942", torch.bfloat16): _NARROW,
    ("gfx942", torch.float16): _NARROW,
}


def launches(architecture: str, dtype: torch.dtype) -> Launches:
    """The configurations for an architecture such as `"sm_90"`, or `"interpreter"`.

    Raises:
        ValueError: the table has none for it.
    """
    if architecture == "interpreter":
        return INTERPRETED
    if (architecture, dtype) not in TABLE:
        known = ", ".join(sorted({name for name, _ in TABLE}))
        raise ValueError(f"no launch table for {architecture} and {dtype}; there are {known}")
    return TABLE[architecture, dtype]
