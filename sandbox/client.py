"""The process's side of the keeper: starts it, sends requests, awaits answers.

One keeper serves a whole process. It is started by the first request and ends with the process,
however that ends.
"""

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.errors import DeadlineError, SandboxError
from headrace.sandbox.keeper import MAX_MESSAGE, encode, receive, send
from headrace.sandbox.transfer import memory_file

_START_S = 20.0
_STOP_S = 10.0
_ANSWER_S = 30.0
_PACKAGES = str(Path(__file__).parents[1].parent)
# The keeper must not see the caller's packages: it is started isolated, with this one folder.
_PROGRAM = (
    "import sys; sys.dont_write_bytecode = True; sys.path.append(sys.argv.pop()); "
    "from headrace.sandbox.keeper import main; main()"
)

_Answer = tuple[dict[str, Any], int | None]
_log = logging.getLogger(__name__)


class Keeper:
    """A started keeper process.

    Attributes:
        held_by: what holds every jail of this keeper, e.g. `namespaces+cgroup1+seccomp`.
        failed: limits that the preflight broke; nothing before there was one.
        cgroups: whether control groups hold the limits.
        nested: whether the keeper is root of its own user namespace only.
        warning: why there are no control groups; empty where there are.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[_Answer]] = {}
        self._count = itertools.count()
        self._trees: dict[str, str] = {}
        hello = self._hello()
        self.cgroups: bool = hello["cgroup"] > 0
        self.nested: bool = hello["nested"]
        held = f"cgroup{hello['cgroup']}" if self.cgroups else "rlimits"
        self.held_by = f"namespaces+{held}+seccomp"
        self.failed: tuple[str, ...] = ()
        self.warning = (
            ""
            if self.cgroups
            else f"limits are held per process only, by rlimits ({hello['reason']})"
        )
        if self.warning:
            _log.warning("the sandbox is weaker on this host: %s", self.warning)
        control.setblocking(False)

    @classmethod
    def start(cls) -> "Keeper":
        """Start a keeper.

        Raises:
            SandboxError: the kernel refuses namespaces, or the keeper did not start.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _PROGRAM),
                    *(str(theirs.fileno()), str(os.getpid()), _PACKAGES),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={},
            )
        try:
            return cls(process, ours)
        except SandboxError:
            ours.close()
            process.wait(_STOP_S)
            raise

    def _hello(self) -> dict[str, Any]:
        self._control.settimeout(_START_S)
        try:
            received = receive(self._control)
        except TimeoutError as error:
            raise SandboxError(f"the keeper did not answer within {_START_S} s") from error
        if received is None:
            raise SandboxError(f"the keeper ended at once, code {self._process.wait(_STOP_S)}")
        hello = received[0]
        if "error" in hello:
            raise SandboxError(
                f"this host cannot run jails: {hello['error']}; nsjail needs mount, pid and user "
                "namespaces (kernel.unprivileged_userns_clone, user.max_user_namespaces, a "
                "container's seccomp profile)"
            )
        return hello

    @property
    def isolation(self) -> str:
        """What is in force, as results say it."""
        return self.held_by + (f" without {', '.join(self.failed)}" if self.failed else "")

    @property
    def alive(self) -> bool:
        """Whether the keeper still runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the keeper."""
        return self._process.pid

    def name(self, prefix: str) -> str:
        """A name that no other jail or workspace of this keeper has."""
        return f"{prefix}{next(self._count)}"

    async def tree(self, source: str) -> str:
        """Path at which the keeper and nsjail reach a folder or file of the host.

        Raises:
            SandboxError: it cannot be shown.
        """
        if source not in self._trees:
            answer, _ = await self.ask("tree", source=source)
            self._trees[source] = answer["path"]
        return self._trees[source]

    async def file(self, name: str, make: Callable[[], Awaitable[bytes]]) -> str:
        """Path at which nsjail reaches a file that only the keeper has.

        Args:
            name: which; it is made once.
            make: makes its contents, at most some 100 KiB.

        Raises:
            SandboxError: it cannot be kept.
        """
        if name not in self._trees:
            answer, _ = await self.ask("file", content=await make())
            self._trees[name] = answer["path"]
        return self._trees[name]

    async def ask(
        self,
        op: str,
        *,
        content: bytes | None = None,
        wait_s: float = _ANSWER_S,
        kills: str = "",
        **fields: object,
    ) -> _Answer:
        """Send a request and await its answer and the descriptor that came with it.

        Args:
            op: name of the request.
            content: bytes to send along as a memory file, so of any number.
            wait_s: deadline for the answer.
            kills: jail that is killed, and whose death is awaited, when the caller is cancelled.
            fields: the request's fields.

        Raises:
            SandboxError: the keeper reports an error or is gone, or the host has no room for
                `content`.
            DeadlineError: no answer within `wait_s` seconds.
        """
        identifier = str(fields.pop("id", "")) or self.name("q")
        with self._expected(identifier) as future:
            try:
                self._send({"id": identifier, "op": op, **fields}, content)
                async with asyncio.timeout(wait_s):
                    answer, fd = await asyncio.shield(future)
            except asyncio.CancelledError:
                if kills:
                    self.tell("kill", jail=kills)
                    await asyncio.wait([future], timeout=_STOP_S)
                raise
            except TimeoutError as error:
                raise DeadlineError(
                    f"the sandbox keeper did not answer {op!r} in {wait_s} s"
                ) from error
        if "error" in answer:
            raise SandboxError(f"sandbox keeper, {op}: {answer['error']}")
        return answer, fd

    def tell(self, op: str, **fields: object) -> None:
        """Send a request whose answer nobody needs."""
        with contextlib.suppress(SandboxError):
            self._send({"id": "", "op": op, **fields})

    def _send(self, message: dict[str, Any], content: bytes | None = None) -> None:
        data = encode(message)
        if len(data) > MAX_MESSAGE:
            raise SandboxError(f"a sandbox request of {len(data)} bytes exceeds {MAX_MESSAGE}")
        try:
            fds = [] if content is None else [memory_file(content)]
        except OSError as error:
            raise SandboxError(
                f"no memory file for the {len(content or b'')} bytes of a sandbox request: {error}"
            ) from error
        try:
            send(self._control, data, fds)
        except BlockingIOError as error:
            raise SandboxError("the sandbox keeper does not read its requests") from error
        except OSError as error:
            raise SandboxError(f"the sandbox keeper is gone: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)

    @contextlib.contextmanager
    def _expected(self, identifier: str) -> "Iterator[asyncio.Future[_Answer]]":
        """Receive the answer to one request while the block runs."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._waiting:
                raise SandboxError("the sandbox is in use by another event loop of this process")
            self._loop = loop
            loop.add_reader(self._control, self._readable)
        future = loop.create_future()
        self._waiting[identifier] = future
        try:
            yield future
        except BaseException:
            # An answer that nobody takes, as that of a jail whose caller was cancelled.
            if future.done() and future.exception() is None:
                _, fd = future.result()
                if fd is not None:
                    os.close(fd)
            raise
        finally:
            self._waiting.pop(identifier, None)
            self._unwatch()

    def _unwatch(self) -> None:
        # Only while something is awaited: a loop that ends must not keep the descriptor.
        if not self._waiting and self._loop is not None:
            self._loop.remove_reader(self._control)
            self._loop = None

    def _readable(self) -> None:
        while True:
            try:
                received = receive(self._control)
            except BlockingIOError:
                return
            if received is None:
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(SandboxError("the sandbox keeper died"))
                self._waiting.clear()
                self._unwatch()
                return
            answer, fds = received
            future_or_none = self._waiting.get(answer["id"])
            if future_or_none is None or future_or_none.done():
                for fd in fds:
                    os.close(fd)
                continue
            future_or_none.set_result((answer, fds[0] if fds else None))

    def close(self) -> None:
        """End the keeper; it kills every jail first."""
        self._control.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_shared: Keeper | None = None


def shared() -> Keeper:
    """Return this process's keeper, starting it where it does not run.

    Raises:
        SandboxError: the host cannot run jails.
    """
    global _shared  # noqa: PLW0603 - one keeper per process is the point
    if _shared is not None and not _shared.alive:
        _shared.close()
        _shared = None
    if _shared is None:
        _shared = Keeper.start()
    return _shared


def close_shared() -> None:
    """End this process's keeper; the next request starts another."""
    global _shared  # noqa: PLW0603
    if _shared is not None:
        _shared.close()
        _shared = None


def _forget_in_child() -> None:
    global _shared  # noqa: PLW0603
    _shared = None


atexit.register(close_shared)
os.register_at_fork(after_in_child=_forget_in_child)
