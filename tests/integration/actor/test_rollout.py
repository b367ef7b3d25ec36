"""The rollout worker on a real broker, with a scripted engine and domain.

The real engine and the real jail run the same worker in the tests of whole runs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats.errors
import pytest
from transformers import AutoTokenizer

from headrace.actor import rollout
from headrace.actor.chat import ChatFormat
from headrace.actor.engine import Generation
from headrace.actor.rollout import RolloutWorker
from headrace.broker.connection import Connection, connected
from headrace.broker.records import (
    Check,
    Execution,
    Failed,
    Issued,
    Span,
    Trajectory,
    Verdict,
    decode,
)
from headrace.broker.runlog import RunLog
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.broker.taskqueue import HeldTask, TaskQueue
from headrace.clock import Clock, SystemClock
from headrace.config import Config, load
from headrace.environments.protocol import EnvironmentFailure, Message, Observation, Task
from headrace.errors import DeadlineError, EngineError, RunMismatchError
from headrace.models import ensure_model

pytestmark = pytest.mark.nats
NAMES = RunNames("t")
TASK = Task(
    domain="scripted",
    level=0,
    split="train",
    index=0,
    messages=[Message(role="user", content="hi")],
    data={},
)


@dataclass
class ScriptedDomain:
    id: str = "scripted"
    levels: int = 1
    failures: int = 0
    closed: int = 0

    def task(self, index: int, *, split: str, level: int) -> Task:
        return TASK

    async def open(self, task: Task, *, seed: int) -> "ScriptedDomain":
        if self.failures:
            self.failures -= 1
            raise EnvironmentFailure("sandbox_error", "the jail broke")
        return self

    @property
    def executions(self) -> list[Execution]:
        return []

    async def step(self, action: str) -> Observation:
        return Observation(done=True)

    async def verdict(self) -> Verdict:
        return Verdict(
            score=1.0, success=True, step_scores=[1.0], checks=[Check(name="c", passed=True)]
        )

    async def close(self) -> None:
        self.closed += 1


@dataclass
class ScriptedEngine:
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""
    asked: int = 0
    length: int = 2

    async def generate(self, prompt: list[int], **_: object) -> Generation:
        self.asked += 1
        await self.gate.wait()
        if self.error:
            raise EngineError(self.error)
        n = self.length
        return Generation([65] * n, [-1.0] * n, [Span(3, 0, n)], "length")


@dataclass
class ScriptedWeights:
    version: int = 3
    lineage: int = 1

    async def wait_for(self, version: int, *, deadline_s: float) -> None:
        if version > self.version:
            raise DeadlineError(f"version {version} did not arrive")


@dataclass
class Bench:
    config: Config
    connection: Connection
    log: RunLog
    queue: TaskQueue
    chat: ChatFormat
    domain: ScriptedDomain
    engine: ScriptedEngine
    limit: int = 1 << 20

    def worker(self, clock: Clock | None = None) -> RolloutWorker:
        return RolloutWorker(
            self.config, self.connection, NAMES, self.log, self.engine, self.chat,
            ScriptedWeights(), actor="a", sample_limit=self.limit, clock=clock or SystemClock(),
        )  # fmt: skip

    async def issue(self, *, ordinal: int = 0, size: int = 2, version: int = 0) -> None:
        issued = Issued(
            ordinal=ordinal, task=TASK.ref, purpose="train", group_size=size, version=version,
            lineage=1, deadline=1e12, seed=0, seen=0,
        )  # fmt: skip
        await self.queue.put(issued, pool="default", delivery="0")

    async def until(self, samples: int) -> None:
        async with asyncio.timeout(60):
            while (await self.log.info()).last_seq < samples:
                pass

    async def records(self) -> list[Trajectory | Failed]:
        return [
            decode(entry.data, Trajectory | Failed, where=entry.subject)  # type: ignore[arg-type]
            for entry in await self.log.read(0)
        ]


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    domain = ScriptedDomain()
    monkeypatch.setattr(rollout, "get_domain", lambda _: domain)
    monkeypatch.setattr(rollout, "_BACKOFF_S", 0.001)
    folder = ensure_model(tmp_path / "tiny", "tiny-llama")
    async with (
        bundled_server(tmp_path / "nats") as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        queue = TaskQueue(connection, NAMES)
        await queue.create(["default"], ack_wait_s=30)
        log = await RunLog.create(connection, NAMES, max_bytes=64 << 20)
        chat = ChatFormat(AutoTokenizer.from_pretrained(folder))
        yield Bench(load([], []), connection, log, queue, chat, domain, ScriptedEngine())


@asynccontextmanager
async def working(worker: RolloutWorker) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.ensure_future(worker.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_every_slot_is_published_and_then_the_task_is_done(bench: Bench) -> None:
    bench.engine.gate.set()
    await bench.issue()
    async with working(bench.worker()):
        await bench.until(2)
        async with asyncio.timeout(60):
            while await bench.queue.groups():
                pass
    first = (await bench.records())[0]
    assert isinstance(first, Trajectory)
    assert first.versions == [Span(3, len(first.tokens) - 2, len(first.tokens))]
    assert bench.domain.closed == 2


async def test_a_slot_that_is_decided_is_not_run_again(bench: Bench) -> None:
    bench.engine.gate.set()
    done = Failed(
        group=0, index=1, attempt=1, actor="b", lineage=1, side="environment", kind="no_actor",
        evidence="",
    )  # fmt: skip
    await bench.log.decide(done, limit=1 << 20, domain="scripted")
    await bench.issue()
    async with working(bench.worker()):
        await bench.until(2)
    assert bench.engine.asked == 1


async def test_a_cancelled_worker_hands_its_task_to_another_at_once(bench: Bench) -> None:
    await bench.issue()
    async with working(bench.worker()) as task:
        async with asyncio.timeout(60):
            while bench.engine.asked < 2:
                await bench.log.info()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    held = await bench.queue.take("default", wait_s=20)
    assert held is not None


async def test_a_worker_that_holds_several_tasks_hands_each_back_at_once(bench: Bench) -> None:
    for ordinal in range(4):
        await bench.issue(ordinal=ordinal)
    async with working(bench.worker()):
        async with asyncio.timeout(60):
            while bench.engine.asked < 8:
                await bench.log.info()
    taken = [await bench.queue.take("default", wait_s=20) for _ in range(4)]
    assert {held.issued.ordinal for held in taken if held is not None} == {0, 1, 2, 3}


async def test_an_engine_that_dies_gives_every_task_that_was_held_to_others_at_once(
    bench: Bench,
) -> None:
    for ordinal in range(4):
        await bench.issue(ordinal=ordinal)
    running = asyncio.ensure_future(bench.worker().run())
    async with asyncio.timeout(60):
        while bench.engine.asked < 8:
            await bench.log.info()
    bench.engine.error = "the engine died"
    bench.engine.gate.set()
    with pytest.raises(EngineError, match="the engine died"):
        await asyncio.wait_for(running, 60)
    taken = [await bench.queue.take("default", wait_s=20) for _ in range(4)]
    assert {held.issued.ordinal for held in taken if held is not None} == {0, 1, 2, 3}


async def test_a_worker_that_stops_while_it_waits_for_a_task_receives_none(bench: Bench) -> None:
    async with working(bench.worker()):
        async with asyncio.timeout(60):
            while not await asking(bench):
                pass
    await bench.issue()
    assert await bench.queue.take("default", wait_s=20) is not None


async def asking(bench: Bench) -> int:
    info = await bench.connection.js.consumer_info(
        NAMES.tasks_stream, NAMES.pool_consumer("default")
    )
    return info.num_waiting or 0


@pytest.mark.parametrize("error", [TimeoutError, nats.errors.FlushTimeoutError])
async def test_a_worker_that_cannot_withdraw_its_requests_hands_its_task_back_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    async def late(timeout: int) -> None:
        raise error

    await bench.issue()
    with monkeypatch.context() as patch:
        async with working(bench.worker()):
            async with asyncio.timeout(60):
                while bench.engine.asked < 2:
                    await bench.log.info()
            patch.setattr(bench.connection.nc, "flush", late)
    assert await bench.queue.take("default", wait_s=20) is not None


async def test_an_environment_failure_is_retried_and_then_recorded_as_failed(bench: Bench) -> None:
    bench.engine.gate.set()
    bench.domain.failures = 2
    await bench.issue(size=1)
    async with working(bench.worker()):
        await bench.until(1)
    (sample,) = await bench.records()
    assert isinstance(sample, Trajectory)
    assert sample.attempt == 3


async def test_attempts_are_bounded_and_the_failure_is_the_environments(bench: Bench) -> None:
    bench.engine.gate.set()
    bench.domain.failures = 99
    await bench.issue(size=1)
    async with working(bench.worker()):
        await bench.until(1)
    (sample,) = await bench.records()
    assert isinstance(sample, Failed)
    assert (sample.side, sample.kind, sample.attempt) == ("environment", "sandbox_error", 3)
    assert bench.domain.failures == 96


async def test_a_task_that_killed_its_actors_is_given_up(bench: Bench) -> None:
    for _ in range(3):
        await bench.queue.begin(0)
    await bench.issue(size=1)
    async with working(bench.worker()):
        await bench.until(1)
    (sample,) = await bench.records()
    assert isinstance(sample, Failed)
    assert sample.kind == "attempts"
    assert bench.engine.asked == 0


async def test_a_worker_behind_the_tasks_version_hands_it_back_and_says_why(bench: Bench) -> None:
    await bench.issue(version=9)
    worker = bench.worker()
    async with working(worker):
        async with asyncio.timeout(60):
            while not worker.unhealthy:
                await bench.log.info()
    assert "version 9" in worker.unhealthy
    assert bench.engine.asked == 0
    assert await bench.queue.groups() == {0}


class HurriedClock(SystemClock):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


async def test_an_error_that_ends_a_tasks_heartbeat_is_logged_and_the_worker_can_be_stopped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: HeldTask) -> None:
        raise KeyError("reply")

    monkeypatch.setattr(HeldTask, "keep", broken)
    await bench.issue()
    with caplog.at_level(logging.ERROR):
        # stopped while it asks the broker, whose answer may swallow the cancellation
        async with working(bench.worker(HurriedClock())), asyncio.timeout(60):
            while "keeping the task of group 0 ended: KeyError" not in caplog.text:
                await bench.log.info()


async def test_a_failing_engine_ends_the_worker_and_hands_the_task_back(bench: Bench) -> None:
    bench.engine.gate.set()
    bench.engine.error = "the engine died"
    await bench.issue()
    with pytest.raises(EngineError, match="the engine died"):
        await asyncio.wait_for(bench.worker().run(), 60)
    assert await bench.queue.take("default", wait_s=20) is not None


async def test_another_domain_version_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.issue()
    monkeypatch.setitem(TASK.data, "changed", 1)
    with pytest.raises(RunMismatchError, match="install the same version"):
        await asyncio.wait_for(bench.worker().run(), 60)


async def test_a_sample_that_is_too_large_is_recorded_as_failed(bench: Bench) -> None:
    bench.engine.gate.set()
    bench.engine.length, bench.limit = 200, 600
    await bench.issue(size=1)
    async with working(bench.worker()):
        await bench.until(1)
    (sample,) = await bench.records()
    assert isinstance(sample, Failed)
    assert sample.kind == "record_too_large"
