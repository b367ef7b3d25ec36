"""Receiving weights: by broadcast when the actor is there in time, by pulling when it is not.

Bytes are received into a host copy beside the one that is served, verified against the manifest,
and only then given to the engine as a whole. What does not verify is dropped and the old version
goes on serving. (version, lineage) never falls.

One loop: consumes the control subject and the head of the weights stream; produces applied
versions; waits for offers or for its poll; is unblocked by either.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from nats.aio.msg import Msg

from headrace.actor.pull import Held, Puller
from headrace.broker.broadcast import (
    BroadcastGroup,
    default_device,
    local_address,
    reach_store,
)
from headrace.broker.connection import Connection
from headrace.broker.host_weights import HostWeights
from headrace.broker.records import decode, encode
from headrace.broker.subjects import RunNames
from headrace.broker.weight_channel import WeightChannel
from headrace.broker.weights import (
    Answer,
    Begin,
    Commit,
    Control,
    Join,
    Manifest,
    Offer,
    Prepare,
    check_bucket,
    supersedes,
)
from headrace.errors import DeadlineError, EngineError, HeadraceError, RecordError, WeightError
from headrace.process import end

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_CLOSE_S = 5.0
_NOTHING = (-1, -1)


class Applied(Protocol):
    """What an engine reports of an update."""

    @property
    def pause_s(self) -> float:
        """Seconds in which nothing was generated."""


class Server(Protocol):
    """What receives whole versions: the engine."""

    async def apply(self, weights: HostWeights, *, version: int) -> Applied:
        """Replace all weights; on EngineError nothing is served any more."""


@dataclass(frozen=True)
class Received:
    """One applied version; times in seconds."""

    version: int
    lineage: int
    way: str
    """`broadcast`, `anchor` or `delta` (pulled)."""
    transfer_s: float
    pause_s: float


@dataclass
class _Round:
    """A broadcast that this actor agreed to take."""

    manifest: Manifest
    started: float
    receiving: "asyncio.Task[HostWeights] | None" = None


class WeightReceiver:
    """Keeps an engine at the newest version, for the length of an `async with` block."""

    def __init__(
        self,
        connection: Connection,
        names: RunNames,
        engine: Server,
        *,
        ident: str,
        round_s: float = 30.0,
        device: torch.device | None = None,
        on_applied: Callable[[Received], None] = lambda _: None,
    ) -> None:
        """Prepare; nothing is received before the block is entered.

        Args:
            connection: to the broker.
            names: names of the run.
            engine: what the versions are for.
            ident: id of this actor, the one in its lease.
            round_s: `weights.round_s`: longest time that a round may keep this actor from pulling.
            device: where broadcast buckets lie, by default `default_device()`.
            on_applied: called after every applied version.
        """
        self._connection = connection
        self._subject = names.control(ident)
        self._actor = ident
        self._engine = engine
        self._round_s = round_s
        self._device = device or default_device()
        self._on_applied = on_applied
        self._channel = WeightChannel(connection, names)
        self._puller = Puller(self._channel)
        self._held: Held | None = None
        self._spare: HostWeights | None = None
        self._round: _Round | None = None
        self._pulling = False
        self._applying = asyncio.Lock()
        self._group: BroadcastGroup | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._served = _NOTHING
        self._trouble = ""
        self._fatal: EngineError | None = None

    @property
    def version(self) -> int:
        """Version that the engine serves; -1 before the first."""
        return self._served[0]

    @property
    def lineage(self) -> int:
        """Learner lineage of that version; -1 before the first."""
        return self._served[1]

    async def wait_for(self, version: int, *, lineage: int = 0, deadline_s: float) -> None:
        """Wait until the engine serves at least this version of at least this lineage.

        Raises:
            DeadlineError: it does not by the deadline.
            EngineError: the engine failed.
            BrokerError: the broker is gone.
        """

        def reached() -> bool:
            return self._task.done() or (self.version >= version and self.lineage >= lineage)

        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(reached)
        except TimeoutError as error:
            trouble = f"; {self._trouble}" if self._trouble else ""
            raise DeadlineError(
                f"actor {self._actor} waited {deadline_s:.0f} s for weights {version} from the "
                f"learner and serves {self.version} (lineage {self.lineage}){trouble}"
            ) from error
        if self._task.done():
            self._task.result()

    async def failed(self) -> None:
        """Return never; raise what ends the receiver.

        Raises:
            EngineError: a version could not be applied: the engine must be started anew.
            BrokerError: the broker stayed away for longer than the connection's patience.
        """
        await asyncio.wait({self._task})
        self._task.result()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await end(self._task)
            with contextlib.suppress(asyncio.CancelledError, HeadraceError):
                self._task.result()
        finally:
            if self._group is not None:
                await asyncio.to_thread(self._group.close().join, _CLOSE_S)
                self._group = None

    async def _run(self) -> None:
        subscription = await self._connection.nc.subscribe(self._subject, cb=self._on_control)
        try:
            while self._fatal is None:
                self._wake.clear()
                self._expire_round()
                if self._round is None:
                    await self._catch_up()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._wake.wait()
            raise self._fatal
        finally:
            await subscription.unsubscribe()
            await self._announce()

    async def _catch_up(self) -> None:
        """Pull if the head is above what is served; a broken transfer is tried again later."""
        self._pulling = True
        started = time.perf_counter()
        try:
            pulled = await self._puller.pull(self._served, self._held, self._take_spare)
            if pulled is not None:
                manifest, weights, way = pulled
                await self._apply(manifest, weights, way, started)
        except (WeightError, RecordError) as error:
            self._trouble = str(error)
            logger.warning("weights were not pulled and are tried again: %s", error)
        finally:
            self._pulling = False

    async def _apply(
        self, manifest: Manifest, weights: HostWeights, way: str, started: float
    ) -> None:
        transfer_s = time.perf_counter() - started
        # a pull and a broadcast may end together; the later one must see what the first applied
        async with self._applying:
            if not supersedes(manifest.version, manifest.lineage, self._served):
                self._spare = weights
                return
            try:
                report = await self._engine.apply(weights, version=manifest.version)
            except EngineError as error:
                self._fatal = error
                await self._announce()
                return
            self._spare = self._held.weights if self._held is not None else None
            self._held = Held(weights, manifest.weights_hash)
            self._served = (manifest.version, manifest.lineage)
            self._trouble = ""
        self._on_applied(
            Received(manifest.version, manifest.lineage, way, transfer_s, report.pause_s)
        )
        await self._announce()

    async def _announce(self) -> None:
        self._wake.set()
        async with self._changed:
            self._changed.notify_all()

    def _take_spare(self, manifest: Manifest) -> HostWeights:
        """Memory to receive into: never that of the version that is served."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.layout == manifest.layout:
            return spare
        return HostWeights(manifest.layout)

    def _expire_round(self) -> None:
        # A learner that died between begin and commit must not keep this actor from pulling.
        current = self._round
        if current is None or time.monotonic() - current.started < self._round_s:
            return
        if self._applying.locked():
            return  # its weights are on their way into the engine
        if current.receiving is None or current.receiving.done():
            self._trouble = f"the broadcast of weights {current.manifest.version} was not finished"
            self._round = None

    async def _on_control(self, message: Msg) -> None:
        try:
            request: Control = decode(message.data, Control, where=self._subject)  # type: ignore[arg-type]
        except RecordError as error:
            logger.warning("%s", error)
            return
        if isinstance(request, Offer):
            self._wake.set()
            return
        try:
            await self._handle(request)
            ok, reason = True, ""
        except (WeightError, RecordError) as error:
            ok, reason = False, str(error)
        answer = Answer(
            ok=ok,
            reason=reason,
            version=self.version,
            lineage=self.lineage,
            epoch=self._group.epoch if self._group is not None else "",
        )
        await message.respond(encode(answer))
        if isinstance(request, Commit) and ok:
            await self._finish_round()

    async def _handle(self, request: Prepare | Join | Begin | Commit) -> None:
        match request:
            case Prepare():
                await self._prepare(request)
            case Join():
                await self._join(request)
            case Begin():
                self._begin(request)
            case Commit():
                await self._verify(request)

    async def _prepare(self, request: Prepare) -> None:
        if self._pulling or self._fatal is not None:
            raise WeightError("busy")
        if not supersedes(request.version, request.lineage, self._served):
            raise WeightError(f"serves {self.version} (lineage {self.lineage}) already")
        if self._round is not None and self._round.receiving is not None:
            raise WeightError("an earlier round is still open")
        manifest = await self._channel.manifest(request.subject)
        if (manifest.version, manifest.lineage) != (request.version, request.lineage):
            raise WeightError(f"the manifest at {request.subject} is another version's")
        self._round = _Round(manifest, time.monotonic())

    async def _join(self, request: Join) -> None:
        def build() -> BroadcastGroup:
            return BroadcastGroup(
                reach_store(request.host, request.port, timeout_s=request.timeout_s),
                epoch=request.epoch,
                rank=request.rank,
                size=request.size,
                address=local_address(request.host, request.port),
                timeout_s=request.timeout_s,
                device=self._device,
            )

        try:
            group = await asyncio.to_thread(build)
        except WeightError:
            self._round = None
            raise
        self._leave_group()
        self._group = group

    def _begin(self, request: Begin) -> None:
        current, group = self._round, self._group
        if current is None or current.receiving is not None:
            raise WeightError("no round was prepared")
        manifest = current.manifest
        if group is None or group.epoch != request.epoch:
            self._round = None
            raise WeightError(f"not in membership {request.epoch}")
        if (manifest.version, manifest.lineage) != (request.version, request.lineage):
            self._round = None
            raise WeightError(f"version {request.version} was not prepared")
        weights = self._take_spare(manifest)
        current.receiving = asyncio.create_task(self._receive(group, manifest, weights))
        current.receiving.add_done_callback(self._received)

    async def _receive(
        self, group: BroadcastGroup, manifest: Manifest, weights: HostWeights
    ) -> HostWeights:
        memory = weights.memory()

        def check(index: int) -> None:
            start = index * manifest.bucket_bytes
            check_bucket(manifest, index, memory[start : start + manifest.bucket_bytes])

        await asyncio.to_thread(
            group.transfer,
            weights.flat,
            manifest.bucket_bytes,
            deadline_s=self._round_s,
            received=check,
        )
        return weights

    def _received(self, task: "asyncio.Task[HostWeights]") -> None:
        if task.cancelled() or task.exception() is None:
            return
        self._trouble = str(task.exception())
        logger.warning("a broadcast broke and its weights are pulled: %s", task.exception())
        self._round = None
        self._leave_group()
        self._wake.set()

    async def _verify(self, request: Commit) -> None:
        current = self._round
        if current is None or current.receiving is None:
            raise WeightError(self._trouble or "no round is open")
        if current.manifest.weights_hash != request.weights_hash:
            self._round = None
            raise WeightError("the commit names other weights")
        await asyncio.wait({current.receiving})
        error = current.receiving.exception()
        if error is not None:
            raise WeightError(str(error))

    async def _finish_round(self) -> None:
        current = self._round
        if current is None or current.receiving is None:
            return
        started = time.perf_counter() - (time.monotonic() - current.started)
        await self._apply(current.manifest, await current.receiving, "broadcast", started)
        self._round = None
        self._wake.set()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
