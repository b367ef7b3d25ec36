"""The learner process: wires log reader, state machine, issuer, trainer and weight publisher.

```
            ┌────────── read ──────────┐
            ▼                          │
  run log ──┴─▶ machine ─▶ formed batches ─▶ train ─▶ log.step ─▶ weights ─▶ checkpoint ─▶ purge
     ▲             │
     └── issued ◀──┴─ issue ─▶ tasks
```

| loop  | consumes           | produces                     | waits for     | unblocked by   |
|-------|--------------------|------------------------------|---------------|----------------|
| read  | run log            | machine state, archive       | records       | actors         |
| issue | machine state      | issued records, tasks        | window room   | samples, steps |
| train | formed batches     | steps, weights, checkpoints  | the next batch| read           |
| watch | leases, state      | progress, re-offered weights | a second      | time           |

Only `read` changes the machine. The optimizer step runs in one thread beside the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import nats.errors

from headrace.broker import leases
from headrace.broker.connection import Connection
from headrace.broker.leases import Lease
from headrace.broker.records import Step, decode
from headrace.broker.runlog import Entry, RunLog
from headrace.broker.state import FINISHED, Current, RunState
from headrace.broker.subjects import RunNames
from headrace.config import Config
from headrace.errors import DeadlineError, LogError, TrainingError
from headrace.learner import checkpoint as checkpoints
from headrace.learner.archive import Archive
from headrace.learner.checkpoint import LearnerState
from headrace.learner.issuer import Issuer
from headrace.learner.machine import Batch, Corrupt, Machine
from headrace.learner.publisher import WeightPublisher
from headrace.learner.report import Report
from headrace.learner.trainer import Trainer, TrainGroup
from headrace.monitor.logs import about
from headrace.process import Signal, lease, race
from headrace.runfolder import existing_checkpoints

logger = logging.getLogger(__name__)

_POLL_S = 0.02
T = TypeVar("T")


class LearnerProcess:
    """A learner that has attached to its run. `headrace.learner.start` builds it."""

    def __init__(
        self,
        config: Config,
        connection: Connection,
        names: RunNames,
        *,
        ident: str,
        lineage: int,
        log: RunLog,
        state: RunState,
        machine: Machine,
        archive: Archive,
        issuer: Issuer,
        trainer: Trainer,
        publisher: WeightPublisher,
        report: Report,
        thread: ThreadPoolExecutor,
    ) -> None:
        self._config = config
        self._run_dir = Path(config.run.dir)
        self._connection = connection
        self._names = names
        self._ident = ident
        self._lineage = lineage
        self._log = log
        self._state = state
        self._machine = machine
        self._archive = archive
        self._issuer = issuer
        self._trainer = trainer
        self._publisher = publisher
        self._report = report
        self._thread = thread
        self._changed = Signal()
        self._caught_up = asyncio.Event()
        self._published = asyncio.Event()
        self._corrupt: list[Corrupt] = []
        self._ledger: dict[int, Step] = {}
        self._actors: list[Lease] = []
        self._newest_record = time.monotonic()
        self._started = time.time()

    def note_corrupt(self, corrupt: Corrupt) -> None:
        """Remember a record that did not decode; `read` keeps it aside."""
        self._corrupt.append(corrupt)

    async def run(self) -> Path:
        """Train until the last step and its held-out probes; returns the final checkpoint's folder.

        Raises:
            HeadraceError: the run cannot go on; everything durable stays.
        """
        folder = await race(self._train(), self._read(), self._issue(), self._watch())
        assert folder is not None, "only the training loop ends"
        return folder

    def lease(self) -> Lease:
        """What this process says about itself now."""
        return lease(
            "learner",
            self._ident,
            started=self._started,
            status=self._phase(),
            detail=self._waiting_for() if self._published.is_set() else "",
            version=self._report.published,
            lineage=self._lineage,
        )

    # read ----------------------------------------------------------------------------------------

    async def _read(self) -> None:
        await self._log.check_position(self._machine.state.position)
        while True:
            entries = await self._log.read(self._machine.state.position)
            for entry in entries:
                self._take(entry)
            for corrupt in self._corrupt:
                logger.warning(
                    "record kept aside: %s", corrupt.reason,
                    extra={"group": corrupt.group, "sample": corrupt.index},
                )  # fmt: skip
                await self._log.keep_dead(
                    corrupt.group, corrupt.index, corrupt.entry, corrupt.reason
                )
            self._corrupt.clear()
            if self._archive.full:
                await self._archive.flush()
            if entries:
                self._newest_record = time.monotonic()
                self._changed.notify()
            else:
                self._caught_up.set()
                await asyncio.sleep(_POLL_S)

    def _take(self, entry: Entry) -> None:
        self._machine.apply(entry)
        self._archive.add(entry)
        if entry.subject == self._names.step:
            step = decode(entry.data, Step, where=entry.subject)
            if step.version > self._trainer.version:
                self._ledger[step.version] = step

    async def _applied(self, seq: int) -> None:
        """Wait until the machine has applied the record with this sequence."""
        deadline = time.monotonic() + self._connection.patience_s
        while self._machine.state.position < seq:
            if time.monotonic() > deadline:
                raise DeadlineError(f"own record {seq} did not come back from the run log")
            await self._changed.wait(1.0)

    # issue ---------------------------------------------------------------------------------------

    async def _issue(self) -> None:
        await self._published.wait()
        while True:
            await self._state.check_lineage(self._lineage)
            if seq := await self._issuer.issue():
                await self._applied(seq)
            await self._issuer.requeue()
            await self._issuer.expire()
            await self._changed.wait(0.5)

    # train ---------------------------------------------------------------------------------------

    async def _train(self) -> Path:
        timesheet = self._report.timesheet
        await self._caught_up.wait()
        machine, trainer, total = self._machine, self._trainer, self._config.learner.steps
        if trainer.version > machine.state.version:
            raise LogError(
                f"the checkpoint holds version {trainer.version}, but the log's ledger ends at "
                f"{machine.state.version}; fork a new run from the checkpoint"
            )
        if not existing_checkpoints(self._run_dir):
            timesheet.switch("checkpoint")
            await self._checkpoint()
        if trainer.version == machine.state.version:
            timesheet.switch("publish weights")
            await self._publish()
        while trainer.version < total:
            timesheet.switch("wait for samples")
            batch = await self._next_batch()
            timesheet.switch("train")
            with about(version=batch.version):
                await self._step(batch)
            if trainer.version >= machine.state.version:
                timesheet.switch("publish weights")
                await self._publish()
                if trainer.version % self._config.learner.checkpoint_every == 0:
                    timesheet.switch("checkpoint")
                    await self._checkpoint()
        timesheet.switch("wait for probes")
        began = time.monotonic()
        while self._issuer.probing():
            self._check_progress(began)
            await self._changed.wait(1.0)
        timesheet.switch("checkpoint")
        await self._checkpoint()
        await self._state.set_current(
            Current(lineage=self._lineage, version=trainer.version, phase=FINISHED)
        )
        timesheet.switch("done")
        self._report.progress("done", self._actors)
        folder = checkpoints.folder_of(self._run_dir, trainer.version)
        self._report.summary(folder)
        return folder

    async def _next_batch(self) -> Batch:
        began = time.monotonic()
        while True:
            batch = self._machine.take_batch()
            if batch is not None:
                if batch.version != self._trainer.version + 1:
                    raise LogError(
                        f"the log forms the batch of version {batch.version}, but the trainer is "
                        f"at {self._trainer.version}"
                    )
                return batch
            self._check_progress(began)
            info = await self._log.info()
            # where open groups hold most of the log, a checkpoint would free too little of it
            goes = self._machine.state.purgeable - info.first_seq
            stays = info.last_seq - self._machine.state.purgeable
            if info.bytes > info.max_bytes // 2 and goes >= stays:
                # the newest checkpoint alone is kept, so that all records before it can go
                await self._checkpoint(keep=1)
            await self._changed.wait(1.0)

    async def _step(self, batch: Batch) -> None:
        recorded = self._ledger.pop(batch.version, None)
        skip = recorded.skipped if recorded else batch.version in self._machine.state.skips
        metrics: dict[str, float] = {}
        tokens, staleness = 0, {}
        if skip:
            logger.warning("step %d is skipped on an operator's word", batch.version)
            self._trainer.pass_over()
        else:
            groups = [TrainGroup(g.issued.ordinal, g.trajectories) for g in batch.groups]
            try:
                result = await self._in_thread(lambda: self._trainer.train(groups))
            except TrainingError as error:
                raise TrainingError(
                    f"step {batch.version} cannot be trained: {error}; to pass over this batch: "
                    f"headrace skip {self._run_dir} --step {batch.version} --reason '...'"
                ) from error
            metrics = result.metrics | {f"seconds/{k}": v for k, v in result.seconds.items()}
            tokens, staleness = result.trained_tokens, result.staleness
        weights_hash = await self._in_thread(self._trainer.weights_hash)
        if recorded is not None:
            if recorded.weights_hash != weights_hash:
                logger.error(
                    "step %d came out different when recomputed (weights %s, ledger %s): kernels "
                    "are not deterministic on this machine",
                    batch.version, weights_hash[:16], recorded.weights_hash[:16],
                )  # fmt: skip
            self._report.step(batch.version, metrics, tokens, staleness, self._actors)
            return
        await self._state.check_lineage(self._lineage)
        step = Step(
            version=batch.version,
            lineage=self._lineage,
            trained=batch.ordinals,
            filtered=batch.filtered,
            failed=batch.failed,
            position=batch.position,
            weights_hash=weights_hash,
            metrics=metrics,
            skipped=skip,
        )
        seq = await self._log.append(
            step,
            after=self._machine.state.last_step_seq,
            message_id=f"step-{batch.version}-{self._lineage}",
        )
        await self._applied(seq)
        self._ledger.pop(batch.version, None)
        self._report.step(batch.version, metrics, tokens, staleness, self._actors)
        logger.info(
            "step %d trained %d groups, %d tokens", batch.version, len(batch.groups), tokens
        )

    async def _publish(self) -> None:
        await self._state.check_lineage(self._lineage)
        weights = await self._in_thread(self._trainer.weights)
        with about(version=self._trainer.version):
            await self._publisher.publish(self._trainer.version, weights)
        await self._state.set_current(Current(lineage=self._lineage, version=self._trainer.version))
        self._report.published = self._trainer.version
        self._published.set()

    async def _checkpoint(self, *, keep: int | None = None) -> None:
        await self._state.check_lineage(self._lineage)
        # encoded before the first await: later records do not change it
        state = checkpoints.encode(
            LearnerState(
                identity=self._log.identity,
                lineage=self._lineage,
                snapshot=self._machine.state,
                totals=self._report.totals(),
                staleness=self._report.staleness,
            )
        )
        await self._archive.flush()
        keep = keep or self._config.learner.keep_checkpoints
        await self._in_thread(
            lambda: checkpoints.save(self._run_dir, self._trainer, state, keep=keep)
        )
        oldest = checkpoints.read(existing_checkpoints(self._run_dir)[0])
        await self._log.purge_to(min(oldest.snapshot.purgeable, self._archive.last))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # watch ---------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                alive = await leases.alive(self._connection, self._names)
                self._actors = [item for item in alive if item.role == "actor"]
                if self._published.is_set():
                    await self._publisher.offer()
            except (nats.errors.Error, TimeoutError) as error:
                logger.debug("leases not read: %r", error)
            self._report.progress(self._phase(), self._actors)
            await asyncio.sleep(1.0)

    def _phase(self) -> str:
        if not self._published.is_set():
            return "starting"
        version = self._machine.state.version
        if version == self._config.learner.steps:
            return "final_probing" if self._issuer.probing() else "done"
        return "probing" if version == 0 and self._issuer.probing() else "training"

    def _waiting_for(self) -> str:
        if not self._actors:
            return "an actor; none is alive, start `headrace actor`"
        pools = {domain.id: domain.pool for domain in self._config.domains}
        served = {pool for actor in self._actors for pool in actor.pools}
        groups = self._machine.state.open.values()
        for domain in sorted({group.issued.task.domain for group in groups}):
            if pools[domain] not in served:
                return (
                    f"an actor of pool {pools[domain]!r} (domain {domain!r}); none serves it, "
                    f"start `headrace actor` with actors.pools=['{pools[domain]}']"
                )
        names = ", ".join(f"{actor.id} ({actor.status})" for actor in self._actors)
        return f"samples of {len(groups)} open groups from {names}"

    def _check_progress(self, waiting_since: float) -> None:
        limit = self._config.learner.max_filtered
        if self._machine.state.filtered_in_a_row > limit:
            tallies = self._machine.state.train
            domains = ", ".join(
                f"{domain} ({tally.successes} of {tally.samples} samples succeeded, "
                f"{tally.environment_failures} failed in the environment)"
                for domain, tally in tallies.items()
            )
            broken = any(t.environment_failures > t.samples for t in tallies.values())
            remedy = (
                "see the actors' logs and `headrace sandbox check`"
                if broken
                else "choose another level or temperature, or start again with a higher "
                "learner.max_filtered"
            )
            raise TrainingError(
                f"more than {limit} groups in a row had no reward spread: {domains}; {remedy}"
            )
        idle = time.monotonic() - max(self._newest_record, waiting_since)
        if idle > self._config.learner.idle_s:
            raise DeadlineError(
                f"no record for {idle:.0f} s (learner.idle_s): waiting for {self._waiting_for()}"
            )
