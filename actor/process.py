"""The actor process: wires engine, weight receiver and rollout worker.

```
  weights ─▶ receiver ─▶ engine ◀──▶ rollout worker ◀── tasks
                                          │
                                          └──▶ samples (run log)
```

| loop    | consumes            | produces          | waits for              | unblocked by       |
|---------|---------------------|-------------------|------------------------|--------------------|
| receive | broadcasts, anchors | a newer engine    | published versions     | the learner        |
| rollout | tasks               | samples           | tasks, its version     | learner, receive   |
| watch   | run state           | the end           | the run to be finished | the learner        |

An actor keeps nothing: whatever it held is done again by another one.
"""

import asyncio
import logging
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from headrace.actor.chat import ChatFormat, load_chat
from headrace.actor.engine import Engine
from headrace.actor.receiver import Received, WeightReceiver
from headrace.actor.rollout import RolloutWorker
from headrace.broker.connection import Connection, connected
from headrace.broker.leases import Lease
from headrace.broker.records import sample_limit
from headrace.broker.runlog import RunLog
from headrace.broker.state import FINISHED, RunState
from headrace.broker.subjects import RunNames
from headrace.clock import SystemClock
from headrace.config import Config, difference, from_json
from headrace.errors import DeadlineError, RunMismatchError
from headrace.process import lease, leased, race
from headrace.sandbox.preflight import proven

logger = logging.getLogger(__name__)


async def run_actor(config: Config, ident: str, *, adopt: bool) -> None:
    """Serve a run until it is finished.

    Args:
        config: of the run; with `adopt`, only its address, name and `[actors]` table count.
        ident: of this process.
        adopt: take the run's configuration from the broker.

    Raises:
        HeadraceError: the actor cannot go on; its tasks are done by others.
    """
    names = RunNames(config.run_name)
    patience = config.broker.connect_s
    async with connected(config.broker.url, name=ident, deadline_s=patience) as connection:
        log = await RunLog.attach(connection, names, deadline_s=patience)
        state = RunState(connection, names)
        config = await _agree(config, state, patience, adopt=adopt)
        with tempfile.TemporaryDirectory(prefix="headrace-actor-") as folder:
            await state.fetch_model_files(Path(folder))
            await ActorProcess(config, ident, connection, names, log, state).serve(Path(folder))
    logger.info("the run is finished")


async def _agree(config: Config, state: RunState, patience: float, *, adopt: bool) -> Config:
    """Compare the configuration with the run's, or adopt the run's."""
    deadline = time.monotonic() + patience
    while (stored := await state.get("config")) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the run's learner did not publish its configuration in {patience:.0f} s"
            )
        await asyncio.sleep(0.2)
    agreed = from_json(stored, where="configuration on the broker")
    if adopt:
        local = replace(config.actors, max_model_len=agreed.actors.max_model_len)
        return replace(agreed, run=config.run, broker=config.broker, actors=local)
    changed = difference(agreed, config)
    if changed:
        raise RunMismatchError(
            f"run {config.run_name!r} has another configuration ({'; '.join(changed)}); use the "
            "run's own file, or give only broker.url and run.name to adopt the run's configuration"
        )
    return config


class ActorProcess:
    """An actor that has agreed with its run. It starts nothing before `serve`."""

    def __init__(
        self,
        config: Config,
        ident: str,
        connection: Connection,
        names: RunNames,
        log: RunLog,
        state: RunState,
    ) -> None:
        self._config = config
        self._ident = ident
        self._connection = connection
        self._names = names
        self._log = log
        self._state = state
        self._started = time.time()
        self._status = "starting"
        self._receiver: WeightReceiver | None = None
        self._worker: RolloutWorker | None = None
        self._updates = {"updates": 0.0, "pulls": 0.0, "pause_s": 0.0}

    async def serve(self, model: Path) -> None:
        """Sample until the run is finished.

        Args:
            model: folder with the run's model configuration and tokenizer.

        Raises:
            HeadraceError: engine, weights, broker or the run's tasks make it impossible to go on.
        """
        async with leased(self._connection, self._names, "actor", self._ident, self._lease):
            chat = load_chat(model)  # seconds; the lease is held meanwhile
            await proven()  # seconds, the first time since the host's boot
            logger.info("starting the engine")
            actors = self._config.actors
            engine = await Engine.start(
                model,
                dtype=self._config.model.dtype,
                max_model_len=actors.max_model_len,
                kv_cache_bytes=actors.kv_cache_bytes,
                threads=actors.threads,
                max_num_seqs=actors.samples_in_flight,
            )
            try:
                await self._sample(engine, chat)
            finally:
                self._status = "stopping"
                await engine.close()

    async def _sample(self, engine: Engine, chat: ChatFormat) -> None:
        config = self._config
        async with WeightReceiver(
            self._connection,
            self._names,
            engine,
            ident=self._ident,
            round_s=config.weights.round_s,
            on_applied=self._count_update,
        ) as receiver:
            self._receiver = receiver
            self._status = "waiting for weights"
            logger.info("waiting for weights")
            await receiver.wait_for(0, deadline_s=config.learner.idle_s)
            self._worker = RolloutWorker(
                config,
                self._connection,
                self._names,
                self._log,
                engine,
                chat,
                receiver,
                actor=self._ident,
                sample_limit=sample_limit(config.actors.max_model_len),
                clock=SystemClock(),
            )
            self._status = "sampling"
            version = receiver.version
            logger.info("sampling at version %d", version, extra={"version": version})
            await race(self._worker.run(), receiver.failed(), _until_finished(self._state))

    def _count_update(self, received: Received) -> None:
        self._updates["updates"] += 1
        self._updates["pulls"] += received.way != "broadcast"
        self._updates["pause_s"] += received.pause_s
        logger.info(
            "weights %d by %s: %.2f s, generation paused %.0f ms",
            received.version,
            received.way,
            received.transfer_s,
            received.pause_s * 1000,
            extra={"version": received.version},
        )

    def _lease(self) -> Lease:
        receiver, worker = self._receiver, self._worker
        return lease(
            "actor",
            self._ident,
            started=self._started,
            status="unhealthy" if worker and worker.unhealthy else self._status,
            detail=worker.unhealthy if worker else "",
            version=receiver.version if receiver else -1,
            lineage=receiver.lineage if receiver else -1,
            pools=self._config.actors.pools,
            held=worker.held if worker else [],
            counters=self._updates | (worker.counters if worker else {}),
        )


async def _until_finished(state: RunState) -> None:
    while True:
        current = await state.current()
        if current is not None and current.phase == FINISHED:
            return
        await asyncio.sleep(1.0)
