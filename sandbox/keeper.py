"""The keeper: a small process that owns every jail of one headrace process.

It lives in a private mount namespace, starts nsjail, reads outputs, holds deadlines and limits, and
reaps. Time limits therefore do not depend on the event loop of the process that asked. When that
process ends, however it ends, the keeper kills every jail, removes the control groups and exits,
and the kernel frees its mounts. It uses the standard library only and is started with `-I -S`.

Messages are JSON objects on a SOCK_SEQPACKET pair; large contents travel as memory files.
"""

import array
import contextlib
import ctypes
import itertools
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from headrace.sandbox import mounts
from headrace.sandbox.cgroups import Cgroups
from headrace.sandbox.process import Jail
from headrace.sandbox.spare import Spares

MAX_MESSAGE = 160 << 10
_PR_SET_NAME = 15
_SPARES = 7


def encode(message: dict[str, Any]) -> bytes:
    """A message as it travels."""
    return json.dumps(message, ensure_ascii=False).encode()


def send(control: socket.socket, data: bytes, fds: list[int]) -> None:
    """Send one encoded message with descriptors; the descriptors stay open here.

    Raises:
        OSError: the other end is gone.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    control.sendmsg([data], rights)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its descriptors; None when the other end is gone.

    Raises:
        BlockingIOError: nothing to read on a non-blocking socket.
    """
    try:
        data, ancillary, _, _ = control.recvmsg(MAX_MESSAGE + 4096, socket.CMSG_SPACE(4 * 4))
    except ConnectionError:
        return None
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data:
        return None
    message: dict[str, Any] = json.loads(data)
    return message, list(fds)


class Keeper:
    """The keeper's loop."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = os.pidfd_open(parent)
        self._nested = mounts.enter_private_namespace()
        self._cgroups = Cgroups.detect()
        self._spares = Spares(self._cgroups, 1 + min(_SPARES, len(os.sched_getaffinity(0))))
        self._poll = select.epoll()
        self._jails: dict[str, Jail] = {}
        self._by_fd: dict[int, Jail] = {}
        self._trees: dict[str, str] = {}
        # Never used again: a tree that could not be shown leaves its name behind.
        self._numbers = itertools.count()

    def serve(self) -> None:
        """Answer requests until the owner is gone, then leave nothing behind."""
        self._reply(
            {
                "id": "hello",
                "nested": self._nested,
                "cgroup": self._cgroups.version,
                "reason": self._cgroups.reason,
            }
        )
        self._poll.register(self._control, select.EPOLLIN)
        self._poll.register(self._parent, select.EPOLLIN)
        try:
            while self._step():
                pass
        finally:
            self._close()

    def _step(self) -> bool:
        now = time.monotonic()
        deadline = min((jail.next_time for jail in self._jails.values()), default=math.inf)
        wait = None if math.isinf(deadline) else max(0.0, deadline - now)
        for fd, _ in self._poll.poll(wait):
            if fd == self._parent:
                return False
            if fd == self._control.fileno():
                received = receive(self._control)
                if received is None:
                    return False
                self._request(*received)
            elif fd in self._by_fd:
                jail = self._by_fd[fd]
                jail.on_ready(fd)
                self._forget(jail.take_closed())
        now = time.monotonic()
        for jail in list(self._jails.values()):
            jail.on_time(now)
            for answer, fds in jail.take_answers():
                self._reply(answer, fds)
            if jail.finished:
                del self._jails[jail.id]
                self._spares.refill()
        return True

    def _forget(self, fds: list[int]) -> None:
        for fd in fds:
            self._by_fd.pop(fd, None)
            os.close(fd)  # which also ends its watch

    def _reply(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            send(self._control, encode(message), fds or [])
        except ConnectionError:
            return  # the owner is gone: its descriptor tells the loop
        finally:
            for fd in fds or []:
                os.close(fd)

    def _request(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            answer, out = self._dispatch(message, fds)
        except OSError as error:
            answer, out = {"error": str(error)}, []
        finally:
            for fd in fds:
                os.close(fd)
        if answer is not None and message["id"]:
            self._reply({"id": message["id"], **answer}, out)

    def _dispatch(
        self, message: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any] | None, list[int]]:
        match message["op"]:
            case "open":
                folder = self._open(message)
                self._spares.refill()
                return {}, [folder]
            case "tree":
                return {"path": self._tree(message["source"])}, []
            case "file":
                return {"path": self._file(fds[0])}, []
            case "close":
                name = message["box"]
                mounts.unmount(f"{mounts.BOXES}/{name}")
                os.rmdir(f"{mounts.BOXES}/{name}")
                return {}, []
            case "rest":
                self._spares.discard()
                return {}, []
            case "start":
                self._start(message, fds)
                return None, []
            case "command":
                jail = self._jails.get(message["jail"])
                if jail is None:
                    return {"ended": True}, []
                jail.command(message["id"], fds[0], message["wall_s"], message["output"])
                return None, []
            case "kill":
                jail = self._jails.get(message["jail"])
                if jail is not None:
                    jail.kill("cancelled")
                return {}, []
            case other:
                return {"error": f"the keeper knows no request {other!r}"}, []

    def _tree(self, source: str) -> str:
        # A jail's user may not be able to reach the source by its path on the host.
        if source not in self._trees:
            path = f"{mounts.TREES}/{next(self._numbers)}"
            mounts.bind(source, path)
            self._trees[source] = path
        return self._trees[source]

    def _file(self, content: int) -> str:
        path = f"{mounts.TREES}/{next(self._numbers)}"
        with open(path, "xb", opener=_for_all_to_read) as file:
            file.write(os.pread(content, os.fstat(content).st_size, 0))
        return path

    def _open(self, message: dict[str, Any]) -> int:
        path = f"{mounts.BOXES}/{message['box']}"
        os.mkdir(path, 0o755)
        try:
            mounts.mount_tmpfs(
                path, f"size={message['disk']},nr_inodes={message['files'] + 4},mode=755"
            )
        except OSError:
            os.rmdir(path)
            raise
        for name, mode in (("work", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
            os.mkdir(f"{path}/{name}")
            os.chown(f"{path}/{name}", message["uid"], message["uid"])
            os.chmod(f"{path}/{name}", mode)
        return os.open(f"{path}/work", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def _start(self, message: dict[str, Any], fds: list[int]) -> None:
        spare = self._spares.take()
        try:
            if spare.group is not None:
                spare.group.limit(
                    memory=message["memory"],
                    processes=message["processes"] + message["overhead"],
                    cpus=message["cpus"],
                )
            jail = Jail(message, fds[0], spare, f"{mounts.BOXES}/{message['box']}")
        except OSError:
            spare.discard()
            raise
        self._jails[jail.id] = jail
        for fd in jail.watched():
            self._by_fd[fd] = jail
            self._poll.register(fd, select.EPOLLIN)

    def _close(self) -> None:
        for jail in self._jails.values():
            jail.kill("cancelled")
        for jail in self._jails.values():
            jail.destroy()
        self._spares.discard()
        self._cgroups.close()


def _for_all_to_read(path: str, flags: int) -> int:
    return os.open(path, flags, 0o444)


def main() -> None:
    """Entry point: `keeper DESCRIPTOR PARENT`."""
    os.setsid()
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"headrace-keeper", 0, 0, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        keeper = Keeper(control, int(sys.argv[2]))
    except OSError as error:
        with contextlib.suppress(ConnectionError):
            send(control, encode({"id": "hello", "error": str(error)}), [])
        return
    keeper.serve()
