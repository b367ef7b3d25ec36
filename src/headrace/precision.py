"""How fast this machine computes in a dtype: many CPUs only emulate the narrow ones."""

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

TOO_SLOW = 3.0
"""Times as long as float32 from which a narrow dtype is warned of."""
_SIZE = 192
_TRIES = 3


def slowdown(dtype: str) -> float:
    """How many times as long a matrix product takes in a dtype as in float32.

    1.0 where a GPU computes. On a CPU without instructions for it, bfloat16 takes about a hundred
    times as long, and so would every step of a run.

    Args:
        dtype: `bfloat16`, `float16` or `float32`.
    """
    import torch

    if dtype == "float32" or torch.cuda.is_available():
        return 1.0
    wide = torch.ones(_SIZE, _SIZE)
    narrow = wide.to({"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype])
    return _seconds(narrow) / _seconds(wide)


def warn_if_slow(dtype: str) -> None:
    """Log a warning where the dtype of a run is only emulated."""
    times = slowdown(dtype)
    if times > TOO_SLOW:
        logger.warning(
            "this CPU takes %.0f times as long in %s as in float32: a new run with "
            'model.dtype="float32" is faster',
            times,
            dtype,
        )


def _seconds(matrix: "Tensor") -> float:
    """Shortest of a few products, which is the least disturbed one."""
    times = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        matrix.mm(matrix)
        times.append(time.perf_counter() - begun)
    return min(times)
