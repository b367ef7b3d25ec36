"""Builders of run logs for tests of the state machine."""

import random
from collections.abc import Callable, Iterable

from headrace.broker.records import (
    Array,
    Failed,
    Issued,
    Record,
    RunConfig,
    Span,
    Step,
    TaskRef,
    Trajectory,
    Turn,
    Verdict,
    encode,
)
from headrace.broker.runlog import Entry
from headrace.broker.subjects import RunNames
from headrace.learner.machine import Batch, Machine

NAMES = RunNames("t")


def run_config(
    *, batch_groups: int = 2, max_versions: int = 1, group_size: int = 2, steps: int = 4
) -> RunConfig:
    return RunConfig(
        batch_groups=batch_groups,
        max_versions=max_versions,
        group_size=group_size,
        steps=steps,
        seed=0,
        config_hash="h",
    )


def issued(
    ordinal: int, *, size: int = 2, version: int = 0, purpose: str = "train", seen: int = 0
) -> Issued:
    return Issued(
        ordinal=ordinal,
        task=TaskRef(domain="d", level=0, split="train", index=ordinal, hash="h"),
        purpose=purpose,
        group_size=size,
        version=version,
        lineage=1,
        deadline=1e12,
        seed=ordinal,
        seen=seen,
    )


def trajectory(group: int, index: int, score: float, *, version: int = 0) -> Trajectory:
    return Trajectory(
        group=group,
        index=index,
        attempt=1,
        actor="a",
        lineage=1,
        tokens=Array.of("int32", [1, 2, 3]),
        roles=[Span(0, 0, 1), Span(1, 1, 3)],
        versions=[Span(version, 1, 3)],
        logprobs=Array.of("float32", [-1.0, -1.0]),
        temperature=1.0,
        verdict=Verdict(score=score, success=score == 1.0, step_scores=[score], checks=[]),
        turns=[Turn(start=1, end=3, stop="stop", generate_s=0.0, execute_s=0.0)],
        executions=[],
        queue_s=0.0,
        wall_s=0.0,
    )


def failed(group: int, index: int) -> Failed:
    return Failed(
        group=group, index=index, attempt=1, actor="a", lineage=1, side="environment",
        kind="no_actor", evidence="",
    )  # fmt: skip


def step(batch: Batch) -> Step:
    return Step(
        version=batch.version,
        lineage=1,
        trained=batch.ordinals,
        filtered=batch.filtered,
        failed=batch.failed,
        position=batch.position,
        weights_hash="w",
        metrics={},
    )


def subject(record: Record) -> str:
    if isinstance(record, Trajectory | Failed):
        return NAMES.sample(record.group, record.index)
    return {RunConfig: NAMES.config, Issued: NAMES.issued, Step: NAMES.step}[type(record)]


class Log:
    """A growing log whose records go straight into a machine; first record of a slot wins."""

    def __init__(self, config: RunConfig) -> None:
        self.entries: list[Entry] = []
        self.machine = Machine(config)
        self.batches: list[Batch] = []
        self._slots: set[str] = set()
        self.append(config)

    def append(self, record: Record) -> bool:
        where = subject(record)
        if isinstance(record, Trajectory | Failed):
            if where in self._slots:
                return False
            self._slots.add(where)
        entry = Entry(len(self.entries) + 1, where, encode(record))
        self.entries.append(entry)
        self.machine.apply(entry)
        return True

    def extend(self, records: Iterable[Record]) -> None:
        for record in records:
            self.append(record)


def simulate(
    config: RunConfig, score: Callable[[int, int], float | None], rng: random.Random
) -> Log:
    """Play a whole run: the window is kept full, samples arrive in random order, training lags.

    Args:
        config: of the run.
        score: of a slot; None for a failed one.
        rng: order of everything that timing would decide.
    """
    log = Log(config)
    pending: list[tuple[int, int, int]] = []
    taken: list[Batch] = []
    machine = log.machine
    while machine.state.version < config.steps:
        while machine.outstanding < machine.window:
            ordinal = machine.state.next_ordinal
            version = machine.state.version
            log.append(issued(ordinal, size=config.group_size, version=version))
            pending += [(ordinal, index, version) for index in range(config.group_size)]
        while (batch := machine.take_batch()) is not None:
            taken.append(batch)
            log.batches.append(batch)
        if taken and (not pending or rng.random() < 0.3):
            log.append(step(taken.pop(0)))
            continue
        group, index, version = pending.pop(rng.randrange(len(pending)))
        value = score(group, index)
        # an actor samples with weights at least as new as the task's
        served = rng.randint(version, machine.state.version)
        log.append(
            failed(group, index)
            if value is None
            else trajectory(group, index, value, version=served)
        )
    return log
