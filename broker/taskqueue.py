"""The task queue: a work queue per pool, with heartbeats, and the count of started attempts.

A task leaves the queue when its actor acknowledges it, after the last slot of the group is decided.
An actor that dies stops its heartbeats and the broker gives the task to another one.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Iterable

import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api
from nats.js.client import JetStreamContext

from headrace.broker.connection import Connection, Retry
from headrace.broker.records import Issued, Task, decode, encode
from headrace.broker.subjects import RunNames
from headrace.errors import RecordError, RunMismatchError


class HeldTask:
    """A task that this actor holds; it must be kept alive, and ended by `done` or `hand_back`."""

    def __init__(self, message: Msg, issued: Issued) -> None:
        self._message = message
        self.issued = issued

    async def keep(self) -> None:
        """Tell the broker that the task is still being worked on."""
        await self._message.in_progress()

    async def done(self) -> None:
        """Acknowledge: every slot of the group is decided.

        An acknowledgement that is lost only means that the task is handed out again, and that its
        next holder finds nothing to do.
        """
        await self._message.ack()

    async def hand_back(self, *, delay_s: float = 0.0) -> None:
        """Give the task back undone, to be handed out again after `delay_s` seconds."""
        await self._message.nak(delay=delay_s or None)


class TaskQueue:
    """The queue of one run. The learner creates and fills it, actors take from it."""

    def __init__(self, connection: Connection, names: RunNames) -> None:
        self._connection = connection
        self._names = names
        self._pulls: dict[str, JetStreamContext.PullSubscription] = {}
        self._requests: set[asyncio.Future[list[Msg]]] = set()

    async def create(self, pools: list[str], *, ack_wait_s: float) -> None:
        """Create the streams and one consumer per pool; existing ones are kept."""
        js = self._connection.js
        async for attempt in Retry(self._connection, "creating the task queue"):
            with attempt:
                await js.add_stream(
                    api.StreamConfig(
                        name=self._names.tasks_stream,
                        subjects=[self._names.task("*", "*")],
                        retention=api.RetentionPolicy.WORK_QUEUE,
                        storage=api.StorageType.FILE,
                        discard=api.DiscardPolicy.NEW,
                        max_msgs=20_000,
                        duplicate_window=3600,
                        allow_direct=True,
                    )
                )
                await js.add_stream(
                    api.StreamConfig(
                        name=self._names.starts_stream,
                        subjects=[self._names.start("*")],
                        storage=api.StorageType.FILE,
                        max_bytes=64 << 20,
                        discard=api.DiscardPolicy.OLD,
                    )
                )
                for pool in pools:
                    await js.add_consumer(
                        self._names.tasks_stream,
                        api.ConsumerConfig(
                            durable_name=self._names.pool_consumer(pool),
                            filter_subject=self._names.task(pool, "*"),
                            ack_policy=api.AckPolicy.EXPLICIT,
                            ack_wait=ack_wait_s,
                            max_deliver=-1,
                            max_ack_pending=4096,
                            max_waiting=4096,
                        ),
                    )

    async def put(self, issued: Issued, *, pool: str, delivery: str) -> None:
        """Queue a group; the same (group, delivery) is stored once."""
        async for attempt in Retry(self._connection, f"queueing group {issued.ordinal}"):
            with attempt:
                await self._connection.js.publish(
                    self._names.task(pool, issued.ordinal),
                    encode(Task(issued=issued)),
                    timeout=10,
                    headers={"Nats-Msg-Id": f"task-{issued.ordinal}-{delivery}"},
                )

    async def groups(self) -> set[int]:
        """Ordinals of the groups that have a task, waiting or held."""
        async for attempt in Retry(self._connection, "listing the queued groups"):
            with attempt:
                info = await self._connection.js.stream_info(
                    self._names.tasks_stream, subjects_filter=self._names.task("*", "*")
                )
                return {int(s.rpartition(".")[2]) for s in (info.state.subjects or {})}
        raise AssertionError("unreachable")

    async def depths(self, pools: list[str]) -> dict[str, tuple[int, int]]:
        """For each pool the tasks that wait and the tasks that are held.

        Raises:
            RunMismatchError: the run has no such pool.
        """
        depths = {}
        for pool in pools:
            async for attempt in Retry(self._connection, f"asking for the depth of pool {pool}"):
                with attempt:
                    try:
                        info = await self._connection.js.consumer_info(
                            self._names.tasks_stream, self._names.pool_consumer(pool)
                        )
                    except nats.js.errors.NotFoundError as error:
                        raise RunMismatchError(
                            f"run {self._names.run!r} has no pool {pool!r}: the domains given are "
                            "not the run's; give the run's own configuration"
                        ) from error
                    depths[pool] = (info.num_pending or 0, info.num_ack_pending or 0)
        return depths

    async def take(self, pool: str, *, wait_s: float) -> HeldTask | None:
        """Take the next task of a pool, or None when none comes within `wait_s` seconds.

        A caller that is cancelled must call `stop_taking` in the end.
        """
        try:
            if pool not in self._pulls:
                self._pulls[pool] = await self._connection.js.pull_subscribe_bind(
                    self._names.pool_consumer(pool), stream=self._names.tasks_stream
                )
            request = asyncio.ensure_future(self._pulls[pool].fetch(1, timeout=wait_s))
            self._requests.add(request)
            # a request cannot be withdrawn: cancelled, it would receive a task for nobody
            await asyncio.wait({request})
            self._requests.discard(request)
            (message,) = request.result()
        except TimeoutError:
            return None
        try:
            task = decode(message.data, Task, where=message.subject)
        except RecordError:
            # the learner finds the group without a task and queues it again
            await message.term()
            raise
        return HeldTask(message, task.issued)

    async def stop_taking(self, held: Iterable[HeldTask] = ()) -> None:
        """End every open request, and then hand back what is held and what still came.

        It waits for open requests to end by themselves: while one is open, what is handed back may
        come straight back to it. What is held goes first, since it is older.

        Args:
            held: tasks to hand back.

        Raises:
            nats.errors.Error, TimeoutError: the broker is away; heartbeats that lapse do the rest.
        """
        pulls, self._pulls = list(self._pulls.values()), {}
        late: list[Msg] = []
        requests = list(self._requests)
        for answer in await asyncio.gather(*requests, return_exceptions=True):
            late += answer if isinstance(answer, list) else []
        try:
            await self._connection.nc.flush(timeout=2)
            for pull in pulls:
                # it raises where all that came was the word that a request had ended
                with contextlib.suppress(TimeoutError):
                    while pull.pending_msgs:
                        late += await pull.fetch(1, timeout=0.1)
                await pull.unsubscribe()
        finally:
            for task in held:
                await task.hand_back()
            for message in late:
                await message.nak()

    async def begin(self, group: int) -> int:
        """Count one more started attempt on a group; returns how many were started so far."""
        subject = self._names.start(group)
        # a start whose answer was lost must not be counted again by the retry
        headers = {"Nats-Msg-Id": f"start-{group}-{uuid.uuid4().hex}"}
        async for attempt in Retry(self._connection, f"counting an attempt on group {group}"):
            with attempt:
                await self._connection.js.publish(subject, b"", timeout=10, headers=dict(headers))
                info = await self._connection.js.stream_info(
                    self._names.starts_stream, subjects_filter=subject
                )
                return (info.state.subjects or {}).get(subject, 1)
        raise AssertionError("unreachable")
