"""Processes that wait in control groups of their own to become nsjail.

Moving a process into a control group makes the kernel wait for every CPU, about 10 ms; a spare has
done so before a jail is asked for. Standard library only.
"""

import array
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
from collections import deque

from headrace.sandbox.cgroups import Cgroups, Group

_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_MAX_ARGV = 256 << 10
_MAX_FDS = 8
# What the interpreter and the keeper ignore, and a command must not inherit as ignored.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)

_libc = ctypes.CDLL(None)


class Spare:
    """A forked process that executes what it is told to, once.

    Attributes:
        group: its control group; None where there are none.
        pid: its process id, which stays when it becomes nsjail.
    """

    def __init__(self, group: Group | None) -> None:
        """Fork.

        Raises:
            OSError: the kernel refuses another process.
        """
        self.group = group
        self._order, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = os.fork()
            if self.pid == 0:
                _wait(theirs, group)

    def become(self, argv: list[str], descriptors: dict[int, int]) -> None:
        """Execute a program.

        Args:
            argv: the program and its arguments.
            descriptors: its descriptors, as number in the program -> number here.

        Raises:
            OSError: the process is gone.
        """
        # All numbers in one byte each, then the arguments: no argument holds NUL.
        data = bytes([len(descriptors), *descriptors]) + "\0".join(argv).encode()
        fds = array.array("i", descriptors.values())
        with self._order:
            self._order.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    def discard(self) -> None:
        """End the process and remove its group."""
        self._order.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        if self.group is not None:
            self.group.remove()


class Spares:
    """A few spares, so that one is at hand when jails start in quick succession."""

    def __init__(self, cgroups: Cgroups, most: int) -> None:
        """Begin without any.

        Args:
            cgroups: where groups are made.
            most: how many wait at the same time.
        """
        self._cgroups = cgroups
        self._most = most
        self._waiting: deque[Spare] = deque()
        self._made = 0

    def take(self) -> Spare:
        """Return the spare that has waited longest, or a new one.

        Raises:
            OSError: the kernel refuses a process or a group.
        """
        return self._waiting.popleft() if self._waiting else self._make()

    def refill(self) -> None:
        """Make one more unless there are enough; where the kernel refuses, `take` will say so."""
        if len(self._waiting) < self._most:
            with contextlib.suppress(OSError):
                self._waiting.append(self._make())

    def discard(self) -> None:
        """End every spare."""
        while self._waiting:
            self._waiting.popleft().discard()

    def _make(self) -> Spare:
        self._made += 1
        group = self._cgroups.create(f"g{self._made}")
        try:
            return Spare(group)
        except OSError:
            if group is not None:
                group.remove()
            raise


def _wait(order: socket.socket, group: Group | None) -> None:
    """In the forked process: enter the group, wait for the order, execute it."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _libc.prctl(_PR_SET_NAME, b"headrace-spare", 0, 0, 0)
        # Whatever the keeper has open belongs to other jails and sessions.
        own = fcntl.fcntl(order.fileno(), fcntl.F_DUPFD, 64)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        os.closerange(0, own)
        os.closerange(own + 1, highest + 1)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        if group is not None:
            group.enter()
        data, fds, _, _ = socket.recv_fds(socket.socket(fileno=own), _MAX_ARGV, _MAX_FDS)
        if data:
            targets, argv = data[1 : data[0] + 1], data[data[0] + 1 :].split(b"\0")
            # Copies above the targets first, so that no target overwrites a source.
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, own + 1) for fd in fds]
            os.closerange(0, own)
            for fd, target in zip(high, targets, strict=True):
                os.dup2(fd, target)
            os.closerange(own, max(high) + 1)
            os.execve(argv[0], argv, {})
    finally:
        os._exit(255)
