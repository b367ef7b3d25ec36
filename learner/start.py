"""Starts a learner: from the configuration to an attached process, new run or old.

The order matters: what actors need (configuration, tokenizer) is on the broker before the slow
parts begin, and nothing is issued before checkpoint 0 and weights 0 exist.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.broker import leases
from headrace.broker.connection import Connection, connected
from headrace.broker.records import RunConfig
from headrace.broker.runlog import RunLog
from headrace.broker.state import RunState
from headrace.broker.subjects import RunNames
from headrace.broker.taskqueue import TaskQueue
from headrace.clock import SystemClock
from headrace.config import Config, fingerprint, from_json, to_json
from headrace.errors import LogError
from headrace.learner import checkpoint as checkpoints
from headrace.learner.archive import Archive
from headrace.learner.curriculum import Curriculum
from headrace.learner.issuer import Issuer
from headrace.learner.machine import Machine
from headrace.learner.process import LearnerProcess
from headrace.learner.publisher import WeightPublisher
from headrace.learner.report import Report
from headrace.learner.trainer import Trainer
from headrace.models import ensure_model
from headrace.process import new_ident
from headrace.runfolder import refuse_difference

logger = logging.getLogger(__name__)


async def run_learner(config: Config) -> None:
    """Run the learner of a run until its last step.

    Raises:
        HeadraceError: see the parts; everything durable stays.
    """
    names = RunNames(config.run_name)
    url, patience = config.broker.url, config.broker.connect_s
    async with (
        connected(url, name="learner", deadline_s=patience) as connection,
        _attached(config, connection, names) as process,
    ):
        folder = await process.run()
    logger.info("run %s is complete; checkpoint in %s", names.run, folder)


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


@asynccontextmanager
async def _attached(
    config: Config, connection: Connection, names: RunNames
) -> AsyncIterator[LearnerProcess]:
    run_dir, clock = Path(config.run.dir), SystemClock()
    curriculum = Curriculum(config)
    state = RunState(connection, names)
    await state.create()
    stored = await state.get("config")
    if stored is not None:
        refuse_difference(
            from_json(stored, where="configuration on the broker"), config, f"run {names.run!r}"
        )
    lineage = await state.raise_lineage()
    await leases.create(connection, names)
    await TaskQueue(connection, names).create(
        curriculum.pools, ack_wait_s=config.attempts.ack_wait_s
    )
    log = await RunLog.create(connection, names, max_bytes=config.broker.log_bytes)
    model = await asyncio.to_thread(ensure_model, Path(config.model.path), config.model.recipe)
    await state.put_model_files(model)
    await state.put("config", to_json(config))

    first = run_record(config)
    existing = checkpoints.existing(run_dir)
    # once there is a checkpoint the record may be purged
    if not existing and await log.last(names.config) is None:
        await log.append(first, after=0, message_id="config-0")
    saved = checkpoints.read(existing[-1]) if existing else None
    if saved is not None and saved.identity != log.identity:
        raise LogError(
            f"{existing[-1]} continues log {saved.identity[:8]}, but the broker's run "
            f"{names.run!r} is log {log.identity[:8]}; fork a new run from the checkpoint"
        )
    thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
    source = existing[-1] if existing else model
    logger.info("loading %s", source)

    def load() -> Trainer:
        make = Trainer.restore if existing else Trainer.load
        return make(
            source,
            config.learner,
            temperature=config.sampling.temperature,
            dtype=config.model.dtype,
        )

    trainer = await asyncio.get_running_loop().run_in_executor(thread, load)
    machine = Machine(first, saved.snapshot if saved else None)
    report = Report(
        run_dir,
        names.run,
        machine,
        totals=saved.totals if saved else None,
        staleness=saved.staleness if saved else None,
    )
    publisher = WeightPublisher(connection, names, config.weights, lineage=lineage)
    ident = new_ident()
    process = LearnerProcess(
        config,
        connection,
        names,
        ident=ident,
        lineage=lineage,
        config_hash=fingerprint(config),
        log=log,
        state=state,
        machine=machine,
        archive=Archive(run_dir / "archive", log.identity),
        issuer=Issuer(
            connection, names, log, machine, curriculum, config, lineage=lineage, clock=clock
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
