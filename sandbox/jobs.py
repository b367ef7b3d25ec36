"""Jobs: runs that come through the broker, so that execution scales apart from the actors.

A job is started at most once, unless it is declared repeatable: the start is a record that only the
first host can write. A job has exactly one result: the first one written. When a host dies, the
broker gives its job to another one, which runs a repeatable job again and answers for any other
that it was lost.
"""

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats.errors
import nats.js.errors
from msgspec import field
from nats.aio.msg import Msg
from nats.js import api

from headrace.broker.connection import Connection, Retry, is_wrong_sequence
from headrace.broker.records import MAX_RECORD_BYTES, Record, decode, encode
from headrace.errors import CollectionError, DeadlineError, RecordError, SandboxError
from headrace.process import is_cancelled
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, Result, SandboxSpec, lost

_JOBS = "HEADRACE_JOBS"
_ONCE = {"start": "HEADRACE_JOB_STARTS", "result": "HEADRACE_JOB_RESULTS"}
"""Streams with at most one record of their kind for each job."""
_CONSUMER = "hosts"
_FETCH_S = 2.0
_LOOK_S = 1.0
_PAUSE_S = 1.0
_HEADER_BYTES = 1024
_KEPT_S = 24 * 3600.0
_log = logging.getLogger(__name__)


class Job(Record, frozen=True, kw_only=True, tag="job"):
    """One run in a fresh session."""

    id: str
    """Unique; a second job with the same id within a day is the same job."""
    spec: SandboxSpec
    files: dict[str, bytes]
    """Contents of the workspace."""
    argv: list[str]
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits | None = None
    repeatable: bool = False
    """Whether it may run again when a host dies; otherwise it then has status `sandbox_error`."""


class JobResult(Record, frozen=True, kw_only=True, tag="job_result"):
    """The one result of a job."""

    id: str
    host: str
    result: Result


def _subject(kind: str, job: str) -> str:
    return f"headrace-jobs.{kind}.{job}"


class JobQueue:
    """Jobs and results on a broker."""

    def __init__(self, connection: Connection, *, ack_wait_s: float = 30.0) -> None:
        """Use a broker.

        Args:
            connection: the broker.
            ack_wait_s: seconds without a sign of life after which a job goes to another host.
        """
        self._connection = connection
        self.ack_wait_s = ack_wait_s

    async def create(self) -> None:
        """Create the streams; existing ones are kept.

        Raises:
            BrokerError: the broker does not answer.
        """
        js = self._connection.js
        async for attempt in Retry(self._connection, "creating the job queue"):
            with attempt:
                await js.add_stream(
                    api.StreamConfig(
                        name=_JOBS,
                        subjects=[_subject("job", "*")],
                        retention=api.RetentionPolicy.WORK_QUEUE,
                        discard=api.DiscardPolicy.NEW,
                        max_msgs=20_000,
                        duplicate_window=_KEPT_S,
                    )
                )
                for kind, name in _ONCE.items():
                    await js.add_stream(
                        api.StreamConfig(
                            name=name,
                            subjects=[_subject(kind, "*")],
                            max_age=_KEPT_S,
                            max_bytes=1 << 30,
                            discard=api.DiscardPolicy.OLD,
                        )
                    )
                await js.add_consumer(
                    _JOBS,
                    api.ConsumerConfig(
                        durable_name=_CONSUMER,
                        ack_policy=api.AckPolicy.EXPLICIT,
                        ack_wait=self.ack_wait_s,
                        max_deliver=-1,
                    ),
                )

    async def run(self, job: Job, *, wait_s: float) -> JobResult:
        """Queue a job and wait for its result.

        Raises:
            BrokerError: the broker does not answer.
            DeadlineError: no host answered within `wait_s` seconds.
        """
        arrived = asyncio.Event()

        async def arrive(_: Msg) -> None:
            arrived.set()

        heard = await self._connection.nc.subscribe(_subject("result", job.id), cb=arrive)
        try:
            async for attempt in Retry(self._connection, f"queueing job {job.id}"):
                with attempt:
                    await self._connection.js.publish(
                        _subject("job", job.id),
                        encode(job),
                        headers={"Nats-Msg-Id": job.id},
                    )
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                # Looked up as well: what was sent while the connection was lost is not heard.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_LOOK_S, deadline - time.monotonic())):
                        await arrived.wait()
                if (result := await self.result(job.id)) is not None:
                    return result
        finally:
            await heard.unsubscribe()
        raise DeadlineError(f"no sandbox host answered job {job.id} within {wait_s:g} s")

    async def result(self, job: str) -> JobResult | None:
        """The result of a job, or None while there is none.

        Raises:
            BrokerError: the broker does not answer.
        """
        async for attempt in Retry(self._connection, f"looking for the result of job {job}"):
            with attempt:
                data = await self._written("result", job)
                if data is not None:
                    return decode(data, JobResult, where=_subject("result", job))
        return None

    async def serve(self, stop: asyncio.Event, *, concurrent: int) -> None:
        """Run jobs on this host until `stop` is set; jobs that are running then are finished.

        Raises:
            BrokerError: the broker does not answer.
            SandboxError: this host cannot run jails.
        """
        pull = await self._connection.js.pull_subscribe_bind(_CONSUMER, stream=_JOBS)

        async def worker() -> None:
            while not stop.is_set() and not is_cancelled():
                try:
                    (message,) = await pull.fetch(1, timeout=_FETCH_S)
                    if not is_cancelled():
                        await self._handle(message)
                except TimeoutError:
                    continue
                except nats.errors.Error as error:
                    if self._connection.nc.is_closed:
                        raise
                    _log.warning("jobs of %s, again in a moment: %s", self._connection.url, error)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PAUSE_S):
                            await stop.wait()

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrent):
                group.create_task(worker())

    async def _handle(self, message: Msg) -> None:
        try:
            job = decode(message.data, Job, where=message.subject)
        except RecordError as error:
            _log.warning("dropped a job: %s", error)
            await message.term()
            return
        if await self.result(job.id) is None:
            async with _kept(message, self.ack_wait_s / 3):
                if await self._publish_once("start", job.id, uuid.uuid4().bytes) or job.repeatable:
                    result = await _run(job)
                else:
                    result = lost("the host that ran this job ended before it answered")
                await self._publish_once("result", job.id, self._answer(job, result))
        await message.ack()

    def _answer(self, job: Job, result: Result) -> bytes:
        host = socket.gethostname()
        # A broker counts a message's headers as well.
        limit = min(MAX_RECORD_BYTES, self._connection.nc.max_payload - _HEADER_BYTES)
        try:
            return encode(JobResult(id=job.id, host=host, result=result), limit=limit)
        except RecordError as error:
            detail = f"{error}; let the job write less, or give it a smaller Limits.output"
            return encode(JobResult(id=job.id, host=host, result=lost(detail)), limit=limit)

    async def _publish_once(self, kind: str, job: str, data: bytes) -> bool:
        """Write a record unless there is one; whether it is then this call's, told by its data."""
        async for attempt in Retry(self._connection, f"writing the {kind} of job {job}"):
            with attempt:
                try:
                    await self._connection.js.publish(
                        _subject(kind, job),
                        data,
                        headers={"Nats-Expected-Last-Subject-Sequence": "0"},
                    )
                except nats.js.errors.APIError as error:
                    if not is_wrong_sequence(error):
                        raise
                    # It may be this call's own: written, but its answer was lost.
                    return await self._written(kind, job) == data
        return True

    async def _written(self, kind: str, job: str) -> bytes | None:
        try:
            message = await self._connection.js.get_last_msg(_ONCE[kind], _subject(kind, job))
        except nats.js.errors.NotFoundError:
            return None
        return message.data or b""


@asynccontextmanager
async def _kept(message: Msg, every_s: float) -> AsyncIterator[None]:
    """Give signs of life for a job while the block runs."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(every_s)
            with contextlib.suppress(nats.errors.Error):
                await message.in_progress()

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _run(job: Job) -> Result:
    try:
        async with Sandbox(job.spec) as box:
            for path, data in job.files.items():
                await box.write(path, data)
            return await box.run(job.argv, stdin=job.stdin, env=job.env, limits=job.limits)
    except (SandboxError, CollectionError, DeadlineError) as error:
        return lost(str(error))
