"""Waiting for processes of a test."""

import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 60.0
POLL_S = 0.005


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(POLL_S)
    raise AssertionError("the condition did not come true")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ended(pid: int) -> None:
    """A killed process that is nobody's child here ends when the kernel comes to it."""
    wait_until(lambda: not alive(pid))
