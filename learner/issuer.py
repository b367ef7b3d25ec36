"""Issues groups: the only place that decides what is sampled, and keeps every open group queued.

consumes   the machine's state, the clock
produces   `Issued` records, tasks, `Failed` records of slots past their deadline
waits for  room in the issue window and in the log
unblocked  by samples, durable steps and purges
"""

import logging
from dataclasses import dataclass

from headrace.broker.connection import Connection
from headrace.broker.records import Failed, Issued, sample_limit
from headrace.broker.runlog import RunLog
from headrace.broker.subjects import RunNames
from headrace.broker.taskqueue import TaskQueue
from headrace.clock import Clock
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.learner.curriculum import Curriculum
from headrace.learner.machine import Group, Machine

logger = logging.getLogger(__name__)

PROBE_WINDOW = 64
"""Probe groups that may be open at the same time."""
REQUEUE_S = 10.0
_RESERVE_BYTES = 8 << 20
_RECORD_BYTES = 2048


@dataclass(frozen=True)
class Room:
    """How many groups may be issued now."""

    train: int
    probe: int


def room(machine: Machine, *, probes: int, log_bytes: int, log_limit: int, sample: int) -> Room:
    """Groups that the windows allow.

    Held-out probes of version 0 come before the first training group and those of the last version
    after the last step. Groups are issued only while the log can hold every sample that is still to
    come, so that no publish is ever refused for space.

    Args:
        machine: the state to decide on.
        probes: probe groups of one evaluation.
        log_bytes: bytes in the log now.
        log_limit: the log's limit.
        sample: largest sample in bytes.
    """
    state, size = machine.state, machine.config.group_size
    free = log_limit - log_bytes - _RESERVE_BYTES - machine.missing_samples * sample
    affordable = max(0, free // (size * sample + _RECORD_BYTES) - 1)
    if state.version in {0, machine.config.steps}:
        missing = probes - state.probes_issued.get(state.version, 0)
        if missing > 0:
            window = PROBE_WINDOW - machine.open_probes()
            return Room(0, max(0, min(missing, window, affordable)))
        if machine.open_probes():
            return Room(0, 0)
    return Room(max(0, min(machine.window - machine.outstanding, affordable)), 0)


class Issuer:
    """Keeps the window full. One instance per learner; its writes are fenced."""

    def __init__(
        self,
        connection: Connection,
        names: RunNames,
        log: RunLog,
        machine: Machine,
        curriculum: Curriculum,
        config: Config,
        *,
        lineage: int,
        clock: Clock,
    ) -> None:
        self._log = log
        self._machine = machine
        self._curriculum = curriculum
        self._config = config
        self._lineage = lineage
        self._clock = clock
        self._queue = TaskQueue(connection, names)
        self._sample = sample_limit(config.actors.max_model_len)
        needed = _RESERVE_BYTES + 2 * (config.learner.group_size * self._sample + _RECORD_BYTES)
        if config.broker.log_bytes < needed:
            raise ConfigError(
                f"broker.log_bytes {config.broker.log_bytes} cannot hold one group of "
                f"{config.learner.group_size} samples of up to {self._sample} bytes; it must be at "
                f"least {needed}"
            )
        self._requeued_at = float("-inf")
        self._started = clock.time()
        self._deliveries = 0

    async def issue(self) -> int:
        """Issue what the window allows; returns the sequence of the last record, 0 if none.

        The caller lets the machine apply that record before it calls again.
        """
        info = await self._log.info()
        machine = self._machine
        allowed = room(
            machine,
            probes=self._curriculum.probes,
            log_bytes=info.bytes,
            log_limit=info.max_bytes,
            sample=self._sample,
        )
        after, seen = machine.state.last_issued_seq, machine.state.position
        ordinal, version = machine.state.next_ordinal, machine.state.version
        purposes = ["probe"] * allowed.probe + ["train"] * allowed.train
        first_probe = machine.state.probes_issued.get(version, 0)
        last = 0
        for offset, purpose in enumerate(purposes):
            probe = purpose == "probe"
            task = (
                self._curriculum.probe_task(first_probe + offset)
                if probe
                else self._curriculum.train_task(ordinal)
            )
            issued = Issued(
                ordinal=ordinal,
                task=task,
                purpose=purpose,
                group_size=1 if probe else machine.config.group_size,
                version=version,
                lineage=self._lineage,
                deadline=self._clock.time() + self._config.attempts.slot_deadline_s,
                seed=self._curriculum.seed(ordinal),
                seen=seen,
            )
            last = after = await self._log.append(
                issued, after=after, message_id=f"issued-{ordinal}-{self._lineage}"
            )
            await self._put(issued)
            ordinal += 1
        return last

    def probing(self) -> bool:
        """Whether probes of the current version are still to be issued, or to be decided."""
        state = self._machine.state
        issued = state.probes_issued.get(state.version, 0)
        return issued < self._curriculum.probes or self._machine.open_probes() > 0

    async def requeue(self) -> None:
        """Queue every open group that has no task, now and then."""
        if self._clock.monotonic() - self._requeued_at < REQUEUE_S:
            return
        self._requeued_at = self._clock.monotonic()
        open_groups = dict(self._machine.state.open)
        queued = await self._queue.groups()
        for ordinal, group in open_groups.items():
            if ordinal not in queued and not group.complete:
                logger.info(
                    "group %d has no task; queueing it again",
                    ordinal,
                    extra={"group": ordinal, "domain": group.issued.task.domain},
                )
                await self._put(group.issued)

    async def expire(self) -> None:
        """Decide the empty slots of groups past their deadline as failed."""
        # what waited while no learner ran has its whole time again
        earliest = self._started + self._config.attempts.slot_deadline_s
        for group in list(self._machine.state.open.values()):
            if max(group.issued.deadline, earliest) < self._clock.time():
                await self._fail(group)

    async def _put(self, issued: Issued) -> None:
        self._deliveries += 1
        await self._queue.put(
            issued,
            pool=self._curriculum.pool(issued.task.domain),
            delivery=f"{self._lineage}.{self._deliveries}",
        )

    async def _fail(self, group: Group) -> None:
        issued = group.issued
        for index in range(issued.group_size):
            if index in group.samples:
                continue
            record = Failed(
                group=issued.ordinal,
                index=index,
                attempt=0,
                actor="learner",
                lineage=self._lineage,
                side="environment",
                kind="no_actor",
                evidence=f"no actor decided it in {self._config.attempts.slot_deadline_s:.0f} s",
            )
            if await self._log.decide(record, limit=self._sample, domain=issued.task.domain):
                logger.warning(
                    "sample %d.%d passed its deadline without an actor", issued.ordinal, index,
                    extra={"group": issued.ordinal, "sample": index, "domain": issued.task.domain},
                )  # fmt: skip
