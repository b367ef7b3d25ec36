"""One running nsjail, seen from the keeper: its descriptors, its deadline, its end.

Standard library only.
"""

import contextlib
import fcntl
import os
import select
import signal
import time
from typing import Any

from headrace.sandbox.cgroups import Counters
from headrace.sandbox.spare import Spare

_CHUNK = 1 << 16
_GRACE_S = 2.0
_NUDGE_S = 0.008
_NUDGE_MAX_S = 0.1
_FOREVER = float("inf")
_LOG_BYTES = 64 << 10
REPORT_FD = 4
VERDICT_FD = 3
COMMAND_FD = 5
LOG_FD = 6
_TARGETS = {
    "stdin": 0,
    "stdout": 1,
    "stderr": 2,
    "verdict": VERDICT_FD,
    "report": REPORT_FD,
    "command": COMMAND_FD,
    "log": LOG_FD,
}


class Stream:
    """Bytes read from one pipe, of which at most `limit` are kept."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.limit = limit
        self.data = bytearray()
        self.truncated = False
        self.open = True
        os.set_blocking(fd, False)

    def read(self) -> None:
        """Read what is there; afterwards `open` tells whether more can come."""
        while self.open:
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            self.open = bool(chunk)
            room = self.limit - len(self.data)
            self.data += chunk[:room]
            if len(chunk) > room:
                self.truncated = True
                return

    def take(self, limit: int) -> bytes:
        """Return what was read, and begin again with a new limit."""
        data = bytes(self.data)
        self.data.clear()
        self.truncated = False
        self.limit = limit
        return data


class Jail:
    """One nsjail process and everything below it."""

    def __init__(self, message: dict[str, Any], stdin: int, spare: Spare, box: str) -> None:
        self.id: str = message["id"]
        self.deadline = _FOREVER
        self._wake = _FOREVER
        self.finished = False
        self._group = spare.group
        # Open while the jail lives: the session may be closed before its last jail has ended.
        self._space = os.open(box, os.O_RDONLY | os.O_DIRECTORY)
        self._reason = ""
        self._exit: int | None = None
        self._usage_s = 0.0
        self._rss = 0
        self._closed: list[int] = []
        self._answers: list[tuple[dict[str, Any], list[int]]] = []
        self._pending: str | None = None
        self._before = Counters(0, 0.0, 0, 0)
        self._final: Counters | None = None
        self._interactive: bool = message["interactive"]
        self.started = time.monotonic()
        limits = {"stdout": message["output"], "stderr": message["output"], "log": _LOG_BYTES}
        if message["verdict"]:
            limits["verdict"] = message["verdict"]
        else:
            limits["report"] = _LOG_BYTES
        pipes = {name: os.pipe() for name in limits}
        given = {name: write for name, (_, write) in pipes.items()}
        if self._interactive:
            given["command"], self._command_fd = os.pipe()
            fcntl.fcntl(self._command_fd, fcntl.F_SETPIPE_SZ, 1 << 20)
            os.set_blocking(self._command_fd, False)
        else:
            self.deadline = self.started + message["wall_s"]
            self._wake = self.started + _NUDGE_S
        self._pid = spare.pid
        self._pidfd = os.pidfd_open(self._pid)
        self.streams = {name: Stream(pipes[name][0], limit) for name, limit in limits.items()}
        sent = {"stdin": stdin, **given}
        # Where the spare is gone, its descriptor tells at once.
        with contextlib.suppress(ConnectionError):
            spare.become(message["argv"], {_TARGETS[name]: fd for name, fd in sent.items()})
        for fd in given.values():
            os.close(fd)

    def watched(self) -> list[int]:
        """Descriptors whose readiness `on_ready` wants to hear of."""
        # nsjail's log, a line for every mount, is read at its end; it fits the pipe.
        streams = (stream.fd for name, stream in self.streams.items() if name != "log")
        return [self._pidfd, *streams]

    def take_closed(self) -> list[int]:
        """Descriptors that are done with, for the loop to close."""
        closed, self._closed = self._closed, []
        return closed

    def take_answers(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Messages to send."""
        answers, self._answers = self._answers, []
        return answers

    def on_ready(self, fd: int) -> None:
        """Read or reap; after the last event, settle the result."""
        if fd == self._pidfd:
            # Never blocking: an event may be meant for an earlier owner of the descriptor's number.
            pid, status, usage = os.wait4(self._pid, os.WNOHANG)
            if pid == 0:
                return
            self._exit = status
            self._usage_s = usage.ru_utime + usage.ru_stime
            self._rss = usage.ru_maxrss * 1024
            log = self.streams["log"]
            log.read()
            log.open = False
            self._closed += [fd, log.fd]
            self._wake = _FOREVER
        for name, stream in self.streams.items():
            if stream.fd != fd:
                continue
            stream.read()
            if stream.truncated and name in {"stdout", "stderr"}:
                self.kill("output_limit")
            if not stream.open:
                self._closed.append(fd)
            elif name == "report":
                self._finish_command()
                if not self._interactive:
                    self._wake = 0.0
        self._settle()

    @property
    def next_time(self) -> float:
        """When `on_time` wants to be called next."""
        return min(self.deadline, self._wake)

    def on_time(self, now: float) -> None:
        """Enforce the deadline; a jail that outlives its kill is killed again."""
        if now >= self._wake and self._exit is None:
            # nsjail can miss the end of its child between a look and a pause, and then sleeps for
            # up to a second; another SIGCHLD makes it look again.
            os.kill(self._pid, signal.SIGCHLD)
            self._wake = now + min(_NUDGE_MAX_S, max(_NUDGE_S, (now - self.started) / 2))
        if now < self.deadline:
            return
        if self._exit is not None:
            self._settle()
        elif self._reason:
            os.kill(self._pid, signal.SIGKILL)
            self.deadline = now + _GRACE_S
        else:
            self.kill("timeout")

    def kill(self, reason: str) -> None:
        """End every process of the jail; the first reason is the one that is reported."""
        if self._reason or self._exit is not None:
            return
        self._reason = reason
        self.deadline = time.monotonic() + _GRACE_S
        self._wake = time.monotonic() + _NUDGE_S
        if self._group is not None:
            # nsjail is left to reap the jail's first process, which would else be an orphan of the
            # host. When it is alone it has not come so far; what it may start now dies at the end.
            if not self._group.kill(but=self._pid):
                os.kill(self._pid, signal.SIGKILL)
        else:
            # nsjail answers by killing the jail's first process and reaping it.
            os.kill(self._pid, signal.SIGTERM)

    def command(self, request: str, text_fd: int, wall_s: float, output: int) -> None:
        """Give the shell in the jail one command.

        Raises:
            OSError: it is too long for the pipe.
        """
        self._pending = request
        for name in ("stdout", "stderr"):
            self.streams[name].take(output)
        if self._group is not None:
            self._before = self._group.counters()
        self.started = time.monotonic()
        self.deadline = self.started + wall_s
        text = os.pread(text_fd, os.fstat(text_fd).st_size, 0)
        os.write(self._command_fd, text + b"\0")

    def destroy(self) -> None:
        """Kill and reap at once, without a result."""
        if self._exit is None:
            self.kill("cancelled")
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            if not ended.poll(_GRACE_S * 1000):
                os.kill(self._pid, signal.SIGKILL)
            os.wait4(self._pid, 0)
        deadline = time.monotonic() + _GRACE_S
        while self._group is not None and not self._group.remove():
            self._group.kill()
            if time.monotonic() > deadline:
                return

    def _finish_command(self) -> None:
        report = self.streams["report"]
        if self._pending is None or b"\n" not in report.data:
            return
        for name in ("stdout", "stderr"):
            self.streams[name].read()
        self.deadline = _FOREVER
        self._answer(self._pending, report.take(_LOG_BYTES))
        self._pending = None

    def _settle(self) -> None:
        """Once nsjail is reaped, its pipes are at their end and its group is empty: the result."""
        if self.finished or self._exit is None:
            return
        self.deadline = _FOREVER
        if any(stream.open for stream in self.streams.values()):
            return
        # Once: a group that is only half removed can no longer be read.
        counters = self._final = self._final or self._counters()
        if self._group is not None and not self._group.remove():
            self._group.kill()
            self.deadline = time.monotonic() + 0.001
            return
        stream = self.streams.get("report")
        report = stream.take(0) if stream is not None else b""
        if not self._interactive:
            self._answer(self.id, report, counters)
        else:
            os.close(self._command_fd)
            if self._pending is not None:
                self._answer(self._pending, report, counters)
            self._answers.append(({"id": self.id, "ended": True}, []))
        os.close(self._space)
        self.finished = True

    def _counters(self) -> Counters:
        if self._group is not None:
            return self._group.counters()
        return Counters(self._rss, self._usage_s, 0, 0)

    def _answer(self, request: str, report: bytes, counters: Counters | None = None) -> None:
        after = counters or self._counters()
        parts = {name: bytes(stream.data) for name, stream in self.streams.items()}
        parts["report"] = report
        cut = [name for name, stream in self.streams.items() if stream.truncated]
        memory_file = os.memfd_create("result", os.MFD_CLOEXEC)
        content = memoryview(b"".join(parts.values()))
        while content:
            content = content[os.write(memory_file, content) :]
        space = os.fstatvfs(self._space)
        answer = {
            "id": request,
            "parts": {name: len(data) for name, data in parts.items()},
            "truncated": cut,
            "reason": self._reason,
            "exit": self._exit,
            "wall_s": time.monotonic() - self.started,
            "cpu_s": after.cpu_s - self._before.cpu_s,
            "peak_memory": after.peak_memory,
            "memory_kills": after.memory_kills - self._before.memory_kills,
            "refused_processes": after.refused_processes - self._before.refused_processes,
            "disk_full": space.f_bavail == 0 or space.f_favail == 0,
        }
        self._answers.append((answer, [memory_file]))
