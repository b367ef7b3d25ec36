"""An actor whose samples are a function of their slot, for tests of everything around the engine.

It speaks the whole protocol to the real broker; only the model and the sandbox are missing. Whole
runs with the real ones are in `tests/chaos`.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.broker.connection import Connection, connected
from headrace.broker.records import Array, Span, Trajectory, Turn, Verdict
from headrace.broker.runlog import RunLog
from headrace.broker.subjects import RunNames
from headrace.broker.taskqueue import TaskQueue
from tests.chaos.commands import WAIT_S

VOCABULARY = 256


def sample(
    group: int, index: int, version: int, temperature: float, *, evidence: str = ""
) -> Trajectory:
    """The sample of a slot: the same tokens and score whoever makes it, whenever."""
    rng = random.Random(f"{group}/{index}")
    prompt = [random.Random(group).randrange(VOCABULARY) for _ in range(5)]
    sampled = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
    length = len(prompt) + len(sampled)
    # a quarter of the groups has no spread
    score = (
        1.0 if hashlib.sha256(f"{group}".encode()).digest()[0] < 64 else float(rng.random() < 0.5)
    )
    return Trajectory(
        group=group,
        index=index,
        attempt=1,
        actor="scripted",
        lineage=1,
        tokens=Array.of("int32", prompt + sampled),
        roles=[Span(0, 0, len(prompt)), Span(1, len(prompt), length)],
        versions=[Span(version, len(prompt), length)],
        logprobs=Array.of("float32", [-5.0] * len(sampled)),
        temperature=temperature,
        verdict=Verdict(
            score=score, success=score == 1.0, step_scores=[score], checks=[], evidence=evidence
        ),
        turns=[Turn(start=len(prompt), end=length, stop="stop", generate_s=0.0, execute_s=0.0)],
        executions=[],
        queue_s=0.0,
        wall_s=0.0,
    )


async def act(
    connection: Connection,
    names: RunNames,
    log: RunLog,
    *,
    temperature: float,
    evidence: str,
) -> None:
    """Serve the run until cancelled, at the version of each task, slots in shuffled order."""
    queue = TaskQueue(connection, names)
    shuffled = random.Random(0)
    while True:
        held = await queue.take("default", wait_s=1)
        if held is None:
            continue
        issued = held.issued
        slots = list(range(issued.group_size))
        shuffled.shuffle(slots)
        for index in slots:
            record = sample(issued.ordinal, index, issued.version, temperature, evidence=evidence)
            await log.decide(record, limit=1 << 20, domain=issued.task.domain)
        await held.done()


@asynccontextmanager
async def acting(
    url: str, run: str, *, temperature: float = 1.0, evidence: str = ""
) -> AsyncIterator[Connection]:
    """A scripted actor beside the block, which may use its connection, and ends when it breaks.

    Args:
        url: of the broker.
        run: name of the run.
        temperature: that the samples claim.
        evidence: text that makes every sample larger.
    """
    names = RunNames(run)
    async with (
        connected(url, name="scripted", deadline_s=WAIT_S) as connection,
        asyncio.TaskGroup() as group,
    ):

        async def work() -> None:
            log = await RunLog.attach(connection, names, deadline_s=WAIT_S)
            await act(connection, names, log, temperature=temperature, evidence=evidence)

        task = group.create_task(work())
        yield connection
        task.cancel()
