"""Starts a learner: from the configuration to an attached process, new run or old.

The order matters: what actors need (configuration, tokenizer) is on the broker before the slow
parts begin, and nothing is issued before checkpoint 0 and weights 0 exist.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.broker import leases
from headrace.broker.connection import Connection, Retry, connected
from headrace.broker.leases import Lease
from headrace.broker.records import RunConfig
from headrace.broker.runlog import RunLog
from headrace.broker.state import RunState
from headrace.broker.subjects import RunNames
from headrace.broker.taskqueue import TaskQueue
from headrace.clock import SystemClock
from headrace.config import Config, fingerprint, from_json, to_json
from headrace.errors import CheckpointError, LogError, RunMismatchError
from headrace.learner import checkpoint as checkpoints
from headrace.learner.archive import Archive
from headrace.learner.checkpoint import LearnerState
from headrace.learner.curriculum import Curriculum
from headrace.learner.issuer import Issuer
from headrace.learner.machine import Machine
from headrace.learner.process import LearnerProcess
from headrace.learner.publisher import WeightPublisher
from headrace.learner.report import Report
from headrace.learner.trainer import Trainer
from headrace.models import base_model
from headrace.monitor.exporters.base import Exporters
from headrace.precision import warn_if_slow
from headrace.process import lease, leased, new_ident
from headrace.runfolder import existing_checkpoints, refuse_difference

logger = logging.getLogger(__name__)


async def run_learner(config: Config) -> None:
    """Run the learner of a run until its last step.

    Raises:
        HeadraceError: see the parts; everything durable stays.
    """
    names, ident, started = RunNames(config.run_name), new_ident(), time.time()
    url, patience = config.broker.url, config.broker.connect_s
    running: list[LearnerProcess] = []

    def current_lease() -> Lease:
        if running:
            return running[0].lease()
        return lease("learner", ident, started=started, status="loading")

    async with connected(url, name="learner", deadline_s=patience) as connection:
        await leases.create(connection, names)
        await _alone(connection, names)
        async with (
            leased(connection, names, "learner", ident, current_lease),
            _attached(config, connection, names, ident, started) as process,
        ):
            running.append(process)
            folder = await process.run()
    logger.info("run %s is complete; checkpoint in %s", names.run, folder)


async def _alone(connection: Connection, names: RunNames) -> None:
    """Wait for the lease of a learner that was killed to expire.

    Raises:
        RunMismatchError: another learner of the run is alive.
    """
    deadline = time.monotonic() + leases.TTL_S + leases.RENEW_S
    while others := await _learners(connection, names):
        if time.monotonic() > deadline:
            raise RunMismatchError(
                f"a learner of run {names.run!r} is alive (pid {others[0].pid} on "
                f"{others[0].host}, {others[0].status}); stop it before another one starts"
            )
        await asyncio.sleep(0.2)


async def _learners(connection: Connection, names: RunNames) -> list[Lease]:
    async for attempt in Retry(connection, "reading the leases"):
        with attempt:
            alive = await leases.alive(connection, names)
            return [other for other in alive if other.role == "learner" and not _is_dead(other)]
    raise AssertionError("unreachable")


def _is_dead(other: Lease) -> bool:
    """Whether a process of this machine has gone, though its lease has not expired."""
    if other.host != socket.gethostname():
        return False
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def run_record(config: Config) -> RunConfig:
    """What the state machine must know of the configuration."""
    return RunConfig(
        batch_groups=config.learner.batch_groups,
        max_versions=config.staleness.max_versions,
        group_size=config.learner.group_size,
        steps=config.learner.steps,
        seed=config.run.seed,
        config_hash=fingerprint(config),
    )


@dataclass(frozen=True)
class _Run:
    """What stands on the broker for a run, and its base model."""

    log: RunLog
    state: RunState
    model: Path
    """Folder of the base model."""


async def _enter(config: Config, connection: Connection, names: RunNames, pools: list[str]) -> _Run:
    """Put on the broker what actors need to start.

    Raises:
        RunMismatchError: the run on the broker has another configuration.
    """
    state = RunState(connection, names)
    await state.create()
    stored = await state.get("config")
    if stored is not None:
        refuse_difference(
            from_json(stored, where="configuration on the broker"), config, f"run {names.run!r}"
        )
    queue = TaskQueue(connection, names)
    await queue.create(pools, ack_wait_s=config.attempts.ack_wait_s)
    log = await RunLog.create(connection, names, max_bytes=config.broker.log_bytes)
    model = await asyncio.to_thread(base_model, config)
    await state.put_model_files(model)
    await state.put("config", to_json(config))
    return _Run(log, state, model)


async def _saved(run_dir: Path, log: RunLog) -> tuple[Path, LearnerState] | None:
    """Newest checkpoint of the run, from which the broker's log goes on; None at version 0.

    Raises:
        LogError: the log is another one, or does not hold what comes next.
    """
    checkpoints.recover(run_dir)
    existing = existing_checkpoints(run_dir)
    if not existing:
        info = await log.info()
        if info.first_seq > 1 and info.last_seq > 0:
            raise LogError(
                f"{run_dir} holds no checkpoint, but the run's log was purged up to record "
                f"{info.first_seq - 1}; put the checkpoints back, or start a new run with another "
                "run.dir and run.name"
            )
        return None
    saved = checkpoints.read(existing[-1])
    if saved.identity != log.identity:
        raise LogError(
            f"{existing[-1]} continues log {saved.identity[:8]}, but the broker holds log "
            f"{log.identity[:8]} of this run; fork a new run: model.path={existing[-1]} and "
            "another run.dir"
        )
    await log.check_position(saved.snapshot.position)
    return existing[-1], saved


async def _load(
    config: Config, thread: ThreadPoolExecutor, base: Path, newest: Path | None
) -> Trainer:
    """Load the newest checkpoint, or the base model, in the trainer's thread."""

    def load() -> Trainer:
        folder, make = (newest, Trainer.restore) if newest else (base, Trainer.load)
        logger.info("loading %s", folder)
        temperature, dtype = config.sampling.temperature, config.model.dtype
        warn_if_slow(dtype)
        return make(folder, config.learner, temperature=temperature, dtype=dtype)

    try:
        return await asyncio.get_running_loop().run_in_executor(thread, load)
    except CheckpointError as error:
        others = existing_checkpoints(Path(config.run.dir))[:-1]
        if not others:
            raise
        raise CheckpointError(
            f"{error}; to resume from {others[-1].name}, move the newer folder away and start again"
        ) from error


@asynccontextmanager
async def _attached(
    config: Config, connection: Connection, names: RunNames, ident: str, started: float
) -> AsyncIterator[LearnerProcess]:
    run_dir = Path(config.run.dir)
    curriculum = Curriculum(config)
    run = await _enter(config, connection, names, curriculum.pools)
    saved = await _saved(run_dir, run.log)
    newest, state = saved or (None, None)
    first = run_record(config)
    # once there is a checkpoint the record may be purged
    if saved is None and await run.log.last(names.config) is None:
        await run.log.append(first, after=0, message_id="config-0")
    thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
    trainer = await _load(config, thread, run.model, newest)
    archive = Archive(run_dir / "archive", run.log.identity)
    exporters = await asyncio.to_thread(
        Exporters.open, config.monitor, run_dir, names.run, run.log.identity
    )
    # last, so that a start that fails leaves a learner that runs alone
    try:
        lineage = await run.state.raise_lineage()
    except BaseException:
        exporters.close()
        raise
    machine = Machine(first, state.snapshot if state else None)
    report = Report(
        run_dir,
        names.run,
        machine,
        exporters,
        started=started,
        totals=state.totals if state else None,
        staleness=state.staleness if state else None,
    )
    publisher = WeightPublisher(connection, names, config.weights, lineage=lineage)
    process = LearnerProcess(
        config,
        connection,
        names,
        ident=ident,
        lineage=lineage,
        log=run.log,
        state=run.state,
        machine=machine,
        archive=archive,
        issuer=Issuer(
            connection,
            names,
            run.log,
            machine,
            curriculum,
            config,
            lineage=lineage,
            clock=SystemClock(),
        ),
        trainer=trainer,
        publisher=publisher,
        report=report,
        thread=thread,
    )
    machine.on_corrupt = process.note_corrupt
    try:
        yield process
    finally:
        await publisher.close()
        report.close()
        thread.shutdown(wait=False, cancel_futures=True)
