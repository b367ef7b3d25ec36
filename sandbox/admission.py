"""Admission: jails of this process together take no more memory than the host has, and its CPUs.

Memory is never promised twice. CPU is shared by the kernel, so a request is admitted while any is
left: what is promised exceeds what there is by less than one request. Were it to fit whole, a
scorer that asks for a core would wait until every tool that only sleeps has ended.

A shell holds its memory for as long as it lives, and its commands ask for CPU alone. So a request
for no memory passes those that wait for memory: they may wait for this very shell to end.
"""

import asyncio
import os
from collections import deque
from pathlib import Path

from headrace.errors import SandboxBusyError, SandboxError

_MEMORY_SHARE = 0.7


class Admission:
    """A queue for two resources, first come first served among those that wait for the same.

    Attributes:
        cpus: CPU seconds per second that may be promised at the same time.
        memory: bytes that may be promised at the same time.
        max_waiting: longest queue; a request beyond it fails at once.
        wait_s: longest wait.
    """

    def __init__(
        self, *, cpus: float, memory: int, max_waiting: int = 4096, wait_s: float = 600.0
    ) -> None:
        self.cpus = cpus
        self.memory = memory
        self.max_waiting = max_waiting
        self.wait_s = wait_s
        self._free_cpus = cpus
        self._free_memory = memory
        self._queue: deque[tuple[float, int, asyncio.Future[None]]] = deque()

    @classmethod
    def of_host(cls) -> "Admission":
        """Every CPU this process may use, and 70 % of the memory that is available now."""
        return cls(
            cpus=float(len(os.sched_getaffinity(0))),
            memory=int(_available_memory() * _MEMORY_SHARE),
        )

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    async def take(self, cpus: float, memory: int) -> None:
        """Wait until the resources are free, and take them.

        Raises:
            SandboxError: the request alone exceeds what there is.
            SandboxBusyError: the queue is full, or the wait was too long.
        """
        if cpus > self.cpus or memory > self.memory:
            raise SandboxError(
                f"a run with {cpus:g} CPUs and {memory >> 20} MiB can never be admitted: this host "
                f"gives jails {self.cpus:g} CPUs and {self.memory >> 20} MiB"
            )
        future = asyncio.get_running_loop().create_future()
        self._queue.append((cpus, memory, future))
        self._admit()
        if future.done():
            return
        if len(self._queue) > self.max_waiting:
            self._queue.pop()
            raise SandboxBusyError(f"{self.max_waiting} runs wait for a jail already")
        try:
            async with asyncio.timeout(self.wait_s):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self.give(cpus, memory)
            else:
                self._queue = deque(each for each in self._queue if each[2] is not future)
                self._admit()
            if isinstance(error, TimeoutError):
                raise SandboxBusyError(f"no jail was free within {self.wait_s:g} s") from error
            raise

    def give(self, cpus: float, memory: int) -> None:
        """Return what `take` took."""
        self._free_cpus += cpus
        self._free_memory += memory
        self._admit()

    def _admit(self) -> None:
        blocked: list[tuple[float, int, asyncio.Future[None]]] = []
        # fractions of a CPU add up with rounding
        while self._queue and self._free_cpus > 1e-9:
            cpus, memory, future = self._queue.popleft()
            if future.done():
                continue
            if memory and (blocked or memory > self._free_memory):
                blocked.append((cpus, memory, future))
                continue
            self._free_cpus -= cpus
            self._free_memory -= memory
            future.set_result(None)
        self._queue.extendleft(reversed(blocked))


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SandboxError("/proc/meminfo does not say how much memory is available")
