"""How each attention kernel is launched: data, chosen by architecture, dtype and head_dim.

Every row was compiled ahead of time for its architecture and neither spills nor exceeds its shared
memory (`headrace.kernels.aot`); no row was tuned by timing.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """One kernel's configuration.

    Attributes:
        queries: query rows of a tile.
        keys: key rows of a tile.
        warps: warps per program.
        stages: depth of the software pipeline.
    """

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Launches:
    """The configurations of one operation.

    Attributes:
        forward: output and log-sum-exp.
        grad_q: gradient of q.
        grad_kv: gradients of k and v.
        grad_v: gradient of v by itself, `grad_kv` then being that of k: where the registers do not
            hold both sums at once.
    """

    forward: Launch
    grad_q: Launch
    grad_kv: Launch
    grad_v: Launch | None = None

    def key_passes(self) -> tuple[tuple[Launch, bool, bool], ...]:
        """The launches over keys, and whether each computes the gradients of k and of v."""
        if self.grad_v is None:
            return ((self.grad_kv, True, True),)
        return ((self.grad_kv, True, False), (self.grad_v, False, True))


_NARROW_SM90 = {
    16: Launches(Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 128, 8, 2)),
    32: Launches(Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 128, 8, 2)),
    64: Launches(Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 128, 8, 2)),
    128: Launches(Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(32, 128, 8, 2)),
    256: Launches(
        Launch(128, 32, 8, 2), Launch(64, 32, 8, 2), Launch(32, 128, 8, 2), Launch(32, 128, 8, 2)
    ),
}
_NARROW_SM100 = _NARROW_SM90 | {
    128: Launches(Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 64, 8, 2)),
    256: Launches(
        Launch(64, 64, 8, 2), Launch(64, 32, 8, 1), Launch(32, 64, 8, 1), Launch(32, 64, 8, 2)
    ),
}
_NARROW_GFX942 = {
    16: Launches(Launch(64, 64, 4, 2), Launch(64, 32, 4, 1), Launch(32, 64, 4, 1)),
    32: Launches(Launch(64, 64, 4, 2), Launch(64, 32, 4, 1), Launch(32, 64, 4, 1)),
    64: Launches(Launch(64, 64, 4, 2), Launch(64, 32, 4, 1), Launch(32, 64, 4, 1)),
    128: Launches(Launch(64, 64, 4, 2), Launch(64, 32, 4, 1), Launch(32, 64, 4, 1)),
    256: Launches(
        Launch(64, 32, 4, 2), Launch(64, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1)
    ),
}
_FLOAT32 = {
    16: Launches(Launch(64, 32, 8, 1), Launch(64, 32, 8, 1), Launch(64, 32, 8, 1)),
    32: Launches(Launch(32, 32, 4, 1), Launch(64, 32, 8, 1), Launch(32, 32, 8, 1)),
    64: Launches(Launch(64, 32, 8, 1), Launch(64, 32, 8, 1), Launch(32, 32, 8, 1)),
    128: Launches(Launch(32, 32, 8, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1)),
    256: Launches(Launch(32, 16, 8, 1), Launch(16, 16, 4, 1), Launch(32, 16, 8, 1)),
}
_FLOAT32_SM100 = _FLOAT32 | {
    64: Launches(Launch(32, 32, 4, 1), Launch(64, 32, 8, 1), Launch(32, 32, 8, 1)),
}
# Unequal sides, and both ways of summing over queries, so that interpretation meets all code.
INTERPRETED = Launches(Launch(32, 16, 1, 1), Launch(16, 32, 1, 1), Launch(16, 32, 1, 1))
INTERPRETED_APART = Launches(
    Launch(32, 16, 1, 1), Launch(16, 32, 1, 1), Launch(16, 32, 1, 1), Launch(32, 16, 1, 1)
)

TABLE: dict[tuple[str, torch.dtype], dict[int, Launches]] = {
    ("sm_90", torch.bfloat16): _NARROW_SM90,
    ("sm_90", torch.float16): _NARROW_SM90,
    ("sm_90", torch.float32): _FLOAT32,
    ("sm_100", torch.bfloat16): _NARROW_SM100,
    ("sm_100", torch.float16): _NARROW_SM100,
    ("sm_100", torch.float32): _FLOAT32_SM100,
    ("gfx942", torch.bfloat16): _NARROW_GFX942,
    ("gfx942", torch.float16): _NARROW_GFX942,
}


def padded(head_dim: int) -> int:
    """Head_dim rounded up to the power of two that the kernels compute with."""
    return max(16, 1 << (head_dim - 1).bit_length())


def launches(architecture: str, dtype: torch.dtype, head_dim: int) -> Launches:
    """The configurations for an architecture such as `"sm_90"`, or `"interpreter"`.

    Raises:
        ValueError: the table has none for it.
    """
    if architecture == "interpreter":
        return INTERPRETED if padded(head_dim) < 256 else INTERPRETED_APART
    if (architecture, dtype) not in TABLE:
        known = ", ".join(sorted({name for name, _ in TABLE}))
        raise ValueError(f"no launch table for {architecture} and {dtype}; there are {known}")
    return TABLE[architecture, dtype][padded(head_dim)]
