"""What every long-running process shares: its event loop, stop signals, identity and lease."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import nats.errors
import uvloop

from headrace.broker import leases
from headrace.broker.connection import Connection
from headrace.broker.leases import Lease
from headrace.broker.subjects import RunNames

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_S = 30
"""Seconds after a stop signal until the process is ended by force."""


def run_until_stopped(main: Coroutine[Any, Any, None]) -> None:
    """Run a process's main coroutine on uvloop until it ends.

    SIGTERM or SIGINT cancels it, and the process exits with 128 plus the signal's number as soon as
    it has closed what it held.
    """
    stopped: list[int] = []

    async def supervised() -> None:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            stopped.append(number)
            task.cancel()
            # whatever swallows the cancellation, the process ends
            signal.alarm(STOP_S)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if stopped:
                # everything is closed; the loop's own end would wait for threads that cannot be
                # interrupted, such as an engine that starts
                leave(128 + stopped[0])
            raise

    uvloop.run(supervised())


async def race(*work: Coroutine[Any, Any, T]) -> T:
    """Run coroutines together until the first one ends; the others are cancelled.

    Returns:
        What the first one returned; an error of one is raised.
    """
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task in done]
        failed = [task for task in ended if task.cancelled() or task.exception() is not None]
        return (failed or ended)[0].result()
    finally:
        await end(*tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait until every one has ended, whatever it ends with.

    Again and again: a library call that ends at the same moment swallows a cancellation.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1)


def is_cancelled() -> bool:
    """Whether the current task was cancelled: a request that ends at that moment swallows it."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """What work returns, which goes on to its end although its caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    return task.result()


def in_background(work: Coroutine[Any, Any, None], what: str) -> "asyncio.Task[None]":
    """Start work that goes on beside its owner until cancelled.

    Nobody awaits it, so an error that ends it is logged, with its traceback, when it happens.
    """

    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s ended: %r", what, task.exception(), exc_info=task.exception())

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain error in a group of simultaneous ones; the others follow from it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def leave(code: int) -> NoReturn:
    """End the process at once, after everything was closed.

    The interpreter's own end takes seconds with torch and vLLM loaded, and waits for an optimizer
    step in its thread, which has no effect before its record.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def new_ident() -> str:
    """A process identifier that is unique on all machines of a run."""
    host = "".join(c for c in socket.gethostname().lower() if c.isalnum())[:16] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"


@asynccontextmanager
async def leased(
    connection: Connection, names: RunNames, role: str, ident: str, state: Callable[[], Lease]
) -> AsyncIterator[None]:
    """Keep a lease renewed for the length of the block, and release it at the end.

    Args:
        connection: to the broker; while it is away the lease may expire, which harms nothing.
        names: of the run.
        role: `learner`, `actor` or `broker`.
        ident: of this process.
        state: what the lease says at this moment.
    """

    async def keep_renewing() -> None:
        while True:
            try:
                await leases.renew(connection, names, state())
            except (nats.errors.Error, TimeoutError) as error:
                logger.debug("lease not renewed: %r", error)
            await asyncio.sleep(leases.RENEW_S)

    renewing = in_background(keep_renewing(), f"renewing the lease of {role} {ident}")
    try:
        yield
    finally:
        await end(renewing)
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await asyncio.wait_for(leases.release(connection, names, role, ident), 2)


def lease(role: str, ident: str, *, started: float, status: str, **more: Any) -> Lease:
    """A lease of this process."""
    return Lease(
        role=role,
        id=ident,
        pid=os.getpid(),
        host=socket.gethostname(),
        started=started,
        status=status,
        **more,
    )


class Signal:
    """Wakes everybody who waits, each time it is notified."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all current waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Wait for the next notification, at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout)


class Timesheet:
    """Where the time of one activity after another goes, in seconds."""

    def __init__(self, seconds: dict[str, float] | None = None, *, running_s: float = 0.0) -> None:
        """Begin with the activity `starting`, which has lasted `running_s` by now."""
        self.seconds = dict(seconds or {})
        self._activity = "starting"
        self._since = time.monotonic() - running_s

    def switch(self, activity: str) -> None:
        """Charge the time since the last switch to the activity that ends, and begin another."""
        now = time.monotonic()
        self.seconds[self._activity] = self.seconds.get(self._activity, 0.0) + now - self._since
        self._activity, self._since = activity, now
