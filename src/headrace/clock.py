"""Time as a dependency: processes get a `Clock`, tests get one they can turn."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where a component takes its time from."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; for deadlines and durations."""

    def time(self) -> float:
        """Seconds since the Unix epoch; for what other processes read."""

    async def sleep(self, seconds: float) -> None:
        """Wait for the given number of seconds."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def time(self) -> float:
        """See `Clock`."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        await asyncio.sleep(seconds)
