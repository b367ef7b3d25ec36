"""Tests of the Triton kernels under Triton's interpreter.

Triton decides when it is imported whether kernels are interpreted, so these tests have a process
of their own: tests/unit/kernels/test_interpreter.py starts it, and any other process leaves this
folder alone.
"""

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` hands out NaN, so that an element that no kernel writes fails its test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
