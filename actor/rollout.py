"""The rollout worker: takes tasks, runs the slots that are undecided, publishes what they give.

consumes   tasks of its pools
produces   one `Trajectory` or `Failed` record per slot
waits for  a task; its version of the weights; the engine and the environments
unblocked  by the learner's issues and published weights

A task is acknowledged after its last slot is decided, so that a task whose actor dies is done by
another; a slot that is published twice is decided by the first record.
"""

import asyncio
import contextlib
import logging
from typing import Protocol

import nats.errors

from headrace.actor.chat import ChatFormat
from headrace.actor.episode import Generator, Limits, run_episode
from headrace.broker.connection import Connection
from headrace.broker.records import Failed, Issued, Trajectory
from headrace.broker.runlog import RunLog
from headrace.broker.subjects import RunNames
from headrace.broker.taskqueue import HeldTask, TaskQueue
from headrace.clock import Clock
from headrace.config import Config
from headrace.environments.protocol import EnvironmentFailure, Task
from headrace.environments.registry import get_domain
from headrace.errors import DeadlineError, RecordError, RunMismatchError, TaskError
from headrace.monitor.logs import about
from headrace.process import finished, first_error, in_background, is_cancelled

logger = logging.getLogger(__name__)

_TAKE_S = 1.0
_BACKOFF_S = 0.5
_UNHEALTHY_S = 5.0


class Weights(Protocol):
    """What the worker needs to know of the weights that the engine serves."""

    @property
    def version(self) -> int:
        """Policy version that is served."""

    @property
    def lineage(self) -> int:
        """Lineage of the learner that published it."""

    async def wait_for(self, version: int, *, deadline_s: float) -> None:
        """Wait until at least this version is served.

        Raises:
            DeadlineError: it did not arrive in time.
        """


class RolloutWorker:
    """Runs the tasks of some pools on one engine.

    A task is asked for while fewer than `actors.samples_in_flight` samples are in flight, and it
    brings a whole group: together the pools may exceed that number by a group each.
    """

    def __init__(
        self,
        config: Config,
        connection: Connection,
        names: RunNames,
        log: RunLog,
        engine: Generator,
        chat: ChatFormat,
        weights: Weights,
        *,
        actor: str,
        sample_limit: int,
        clock: Clock,
    ) -> None:
        self._config = config
        self._log = log
        self._queue = TaskQueue(connection, names)
        self._engine = engine
        self._chat = chat
        self._weights = weights
        self._actor = actor
        self._sample_limit = sample_limit
        self._clock = clock
        self._held: dict[int, HeldTask] = {}
        self._room = asyncio.Condition()
        self._in_flight = 0
        self.unhealthy = ""
        """Why this worker makes no progress; empty when it does."""
        self.counters = {"sampled_tokens": 0.0, "samples": 0.0, "failures": 0.0}

    @property
    def held(self) -> list[int]:
        """Groups whose tasks are held."""
        return sorted(self._held)

    async def run(self) -> None:
        """Take tasks and run them until cancelled; what is held then is handed back.

        Raises:
            EngineError: the engine failed.
            BrokerError: the broker is away for too long, or the log is full.
            RunMismatchError: this machine's domains make other tasks than the learner's.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for pool in self._config.actors.pools:
                    tasks.create_task(self._take(pool, tasks))
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            # a second cancellation must not come between withdrawing requests and handing back
            await finished(self._hand_back())

    async def _hand_back(self) -> None:
        """Give every task that is held back, and receive none any more."""
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await self._queue.stop_taking(self._held.values())
        self._held.clear()

    async def _take(self, pool: str, tasks: asyncio.TaskGroup) -> None:
        while True:
            if is_cancelled():
                raise asyncio.CancelledError
            async with self._room:
                await self._room.wait_for(
                    lambda: self._in_flight < self._config.actors.samples_in_flight
                )
            try:
                held = await self._queue.take(pool, wait_s=_TAKE_S)
            except RecordError as error:
                logger.warning("task not understood, left to the learner: %s", error)
                continue
            except nats.errors.Error as error:
                logger.warning("no task from pool %s: %r", pool, error)
                await self._clock.sleep(_TAKE_S)
                continue
            if held is None:
                continue
            issued = held.issued
            self._held[issued.ordinal] = held
            if is_cancelled():
                raise asyncio.CancelledError
            self._in_flight += issued.group_size
            with about(group=issued.ordinal, domain=issued.task.domain, version=issued.version):
                tasks.create_task(self._run_group(held))

    async def _run_group(self, held: HeldTask) -> None:
        issued = held.issued
        keeping = in_background(self._keep(held), f"keeping the task of group {issued.ordinal}")
        try:
            await self._run_slots(issued)
            await held.done()
            logger.info("group %d of %s is sampled", issued.ordinal, issued.task.domain)
        except DeadlineError as error:
            self.unhealthy = str(error)
            logger.warning("group %d handed back: %s", issued.ordinal, error)
            await held.hand_back(delay_s=_UNHEALTHY_S)
        finally:
            keeping.cancel()
        # an error ends the worker, which hands back what is held then
        del self._held[issued.ordinal]
        async with self._room:
            self._in_flight -= issued.group_size
            self._room.notify_all()

    async def _keep(self, held: HeldTask) -> None:
        while True:
            await self._clock.sleep(self._config.attempts.ack_wait_s / 3)
            with contextlib.suppress(nats.errors.Error):
                await held.keep()

    async def _run_slots(self, issued: Issued) -> None:
        taken = self._clock.monotonic()
        await self._weights.wait_for(
            issued.version, deadline_s=self._config.attempts.slot_deadline_s / 3
        )
        self.unhealthy = ""
        decided = await self._log.decided(issued.ordinal)
        slots = [index for index in range(issued.group_size) if index not in decided]
        if not slots:
            return
        attempt = await self._queue.begin(issued.ordinal)
        if attempt > self._config.attempts.max:
            reason = f"{attempt - 1} attempts were started and none finished it"
            for index in slots:
                await self._publish(
                    self._failed(issued, index, attempt, "attempts", reason), issued
                )
            return
        task = self._task(issued)
        if is_cancelled():
            raise asyncio.CancelledError
        async with asyncio.TaskGroup() as group:
            for index in slots:
                with about(sample=index):
                    group.create_task(self._run_slot(issued, task, index, attempt, taken))

    def _task(self, issued: Issued) -> Task:
        ref = issued.task
        task = get_domain(ref.domain).task(ref.index, split=ref.split, level=ref.level)
        if task.ref != ref:
            raise RunMismatchError(
                f"domain {ref.domain!r} makes another task here than at the learner (hash "
                f"{task.ref.hash}, issued {ref.hash}); install the same version on every machine"
            )
        return task

    async def _run_slot(
        self, issued: Issued, task: Task, index: int, attempt: int, taken: float
    ) -> None:
        sampling = self._config.sampling
        limits = Limits(
            max_new_tokens=sampling.max_new_tokens,
            max_model_len=self._config.actors.max_model_len,
            deadline_s=self._config.attempts.episode_s,
        )
        domain = get_domain(task.domain)
        while True:
            lineage = self._weights.lineage
            begun = self._clock.monotonic()
            try:
                result = await run_episode(
                    self._engine,
                    self._chat,
                    domain,
                    task,
                    seed=issued.seed + index,
                    temperature=sampling.temperature,
                    limits=limits,
                    request_id=f"{issued.ordinal}.{index}.{attempt}",
                    clock=self._clock,
                )
                record: Trajectory | Failed = result.trajectory(
                    group=issued.ordinal,
                    index=index,
                    attempt=attempt,
                    actor=self._actor,
                    lineage=lineage,
                    queue_s=begun - taken,
                )
            except (EnvironmentFailure, TaskError, RecordError) as error:
                kind = error.kind if isinstance(error, EnvironmentFailure) else "task_error"
                evidence = error.evidence if isinstance(error, EnvironmentFailure) else str(error)
                logger.warning(
                    "sample %d.%d attempt %d: %s: %s", issued.ordinal, index, attempt, kind,
                    evidence,
                )  # fmt: skip
                if attempt < self._config.attempts.max:
                    await self._clock.sleep(_BACKOFF_S * 2**attempt)
                    attempt += 1
                    continue
                record = self._failed(issued, index, attempt, kind, evidence)
            await self._publish(record, issued)
            return

    def _failed(self, issued: Issued, index: int, attempt: int, kind: str, evidence: str) -> Failed:
        return Failed(
            group=issued.ordinal,
            index=index,
            attempt=attempt,
            actor=self._actor,
            lineage=self._weights.lineage,
            side="environment",
            kind=kind,
            evidence=evidence[:2000],
        )

    async def _publish(self, record: Trajectory | Failed, issued: Issued) -> None:
        domain = issued.task.domain
        try:
            await self._log.decide(record, limit=self._sample_limit, domain=domain)
        except RecordError as error:
            record = self._failed(
                issued, record.index, record.attempt, "record_too_large", str(error)
            )
            await self._log.decide(record, limit=self._sample_limit, domain=domain)
        self.counters["samples"] += 1
        if isinstance(record, Trajectory):
            self.counters["sampled_tokens"] += len(record.logprobs)
        else:
            self.counters["failures"] += 1
