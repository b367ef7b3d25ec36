"""Publishing weights: every version can be pulled, and is broadcast to the actors that are there.

In order: copy into flat memory, hash, compare with the version before -> manifest on the broker ->
chunks on the broker and broadcast at the same time -> head on the broker (from here on the version
can be pulled) -> purge below a new anchor -> offer to whoever missed the broadcast.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import nats.errors
import torch

from headrace.broker import leases
from headrace.broker.broadcast import default_device
from headrace.broker.connection import Connection
from headrace.broker.delta import changed_share, encode_delta
from headrace.broker.host_weights import HostWeights, layout_of
from headrace.broker.subjects import RunNames
from headrace.broker.weight_channel import CHUNK_BYTES, WeightChannel
from headrace.broker.weights import (
    ALIGNMENT,
    ANCHOR,
    DELTA,
    Head,
    Link,
    Manifest,
    bucket_ranges,
    weights_hash,
)
from headrace.config import Weights
from headrace.errors import FencedError
from headrace.learner.broadcaster import Broadcaster

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A delta that changes more words than this is stored as an anchor: it would be as long as half of
# one, and every actor that is behind would have to read the anchor before it as well.
_MOST_CHANGED = 0.4


@dataclass(frozen=True)
class _Staged:
    """A version in flat memory, hashed, and compared with the version published before."""

    version: int
    weights: HostWeights
    weights_hash: str
    bucket_hashes: list[bytes]
    delta: bytes | None


@dataclass(frozen=True)
class PublishReport:
    """What one publication cost; times in seconds."""

    version: int
    kind: str
    """`anchor` or `delta`."""
    stored_bytes: int
    total_bytes: int
    reached: list[str]
    """Actors that verified the broadcast."""
    membership: str
    """Name of the broadcast group that stands; empty if none."""
    offered: list[str]
    """Actors that were told to pull."""
    stage_s: float
    """Copying, hashing and comparing."""
    store_s: float
    broadcast_s: float
    total_s: float


class WeightPublisher:
    """The one writer of a run's weights."""

    def __init__(
        self,
        connection: Connection,
        names: RunNames,
        settings: Weights,
        *,
        lineage: int,
        device: torch.device | None = None,
    ) -> None:
        """Prepare; nothing is sent before the first `publish`.

        Args:
            connection: to the broker.
            names: names of the run.
            settings: the `weights` table of the configuration.
            lineage: of this learner.
            device: where broadcast buckets lie, by default `default_device()`.
        """
        self._channel = WeightChannel(connection, names)
        self._connection = connection
        self._names = names
        self._settings = settings
        self._lineage = lineage
        self._bucket_bytes = max(settings.bucket_bytes // ALIGNMENT, 1) * ALIGNMENT
        self._device = device or default_device()
        self._broadcaster: Broadcaster | None = None
        self._chain: list[Link] = []
        self._head_seq = 0
        self._published: _Staged | None = None
        self._spare: HostWeights | None = None

    async def _start(self) -> Broadcaster:
        await self._channel.create()
        found = await self._channel.head()
        if found is not None:
            head, self._head_seq = found
            if head.lineage >= self._lineage:
                raise FencedError(
                    f"weights {head.version} were published by learner lineage {head.lineage}; "
                    f"lineage {self._lineage} must not publish"
                )
        return Broadcaster(
            self._connection.nc,
            self._names,
            lineage=self._lineage,
            interface=self._settings.interface,
            round_s=self._settings.round_s,
            device=self._device,
        )

    async def _actors(self) -> list[leases.Lease]:
        try:
            alive = await leases.alive(self._connection, self._names)
        except (nats.errors.Error, TimeoutError) as error:
            # whoever is there pulls; a broadcast is only the quicker way
            logger.debug("leases not read: %r", error)
            return []
        return [lease for lease in alive if lease.role == "actor"]

    def _stage(self, version: int, tensors: Mapping[str, torch.Tensor]) -> _Staged:
        if self._spare is None:
            before = self._published
            layout = before.weights.layout if before else layout_of(tensors)
            self._spare = HostWeights(layout)
        weights = self._spare
        weights.fill(tensors)
        flat = weights.array()
        memory = weights.memory()
        hashes = [
            hashlib.sha256(memory[start:end]).digest()
            for start, end in bucket_ranges(flat.size, self._bucket_bytes)
        ]
        delta = None
        if self._published is not None and len(self._chain) < self._settings.anchor_every:
            base = self._published.weights.array()
            if changed_share(base, flat) <= _MOST_CHANGED:
                delta = encode_delta(base, flat, self._bucket_bytes)
        return _Staged(version, weights, weights_hash(weights.layout, hashes), hashes, delta)

    async def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> PublishReport:
        """Make a version pullable and broadcast it; then offer it to whoever missed that.

        Args:
            version: policy version; above the one before.
            tensors: by checkpoint name, without tied duplicates, in the rollout dtype. They must
                not change before this returns.

        Raises:
            WeightError: names or shapes are not those of the version before.
            FencedError: another learner publishes for this run.
            BrokerError: the broker did not take it.
        """
        started = time.perf_counter()
        if self._broadcaster is None:
            self._broadcaster = await self._start()
        staged = await asyncio.to_thread(self._stage, version, tensors)
        stage_s = time.perf_counter() - started
        kind = ANCHOR if staged.delta is None else DELTA
        stored = staged.weights.memory() if staged.delta is None else memoryview(staged.delta)
        chunks = [stored[i : i + CHUNK_BYTES] for i in range(0, len(stored), CHUNK_BYTES)]
        manifest = self._manifest(staged, kind, len(stored), len(chunks))
        first_seq = await self._channel.put_manifest(manifest)
        actors = [lease.id for lease in await self._actors()]
        subject = self._channel.subject(kind, staged.version, self._lineage)
        (_, store_s), (reached, broadcast_s) = await asyncio.gather(
            _timed(self._channel.put_chunks(manifest, chunks)),
            _timed(self._broadcaster.send(manifest, subject, staged.weights.flat, actors)),
        )
        link = Link(
            kind,
            staged.version,
            self._lineage,
            manifest.base_hash,
            staged.weights_hash,
            first_seq,
        )
        chain = [link] if kind == ANCHOR else [*self._chain, link]
        head = Head(version=staged.version, lineage=self._lineage, chain=chain)
        self._head_seq = await self._channel.put_head(head, self._head_seq)
        self._chain = chain
        self._spare = self._published.weights if self._published is not None else None
        self._published = staged
        if kind == ANCHOR:
            await self._channel.purge_below(first_seq)
        missed = [actor for actor in actors if actor not in reached]
        await self._broadcaster.offer(staged.version, self._lineage, missed)
        return PublishReport(
            staged.version,
            kind,
            len(stored),
            staged.weights.layout.nbytes,
            reached,
            self._broadcaster.epoch,
            missed,
            stage_s,
            store_s,
            broadcast_s,
            time.perf_counter() - started,
        )

    def _manifest(
        self, staged: _Staged, kind: str, stored_bytes: int, chunk_count: int
    ) -> Manifest:
        base = self._published.weights_hash if kind == DELTA and self._published else ""
        return Manifest(
            version=staged.version,
            lineage=self._lineage,
            kind=kind,
            base_hash=base,
            layout=staged.weights.layout,
            bucket_bytes=self._bucket_bytes,
            bucket_hashes=staged.bucket_hashes,
            weights_hash=staged.weights_hash,
            chunk_count=chunk_count,
            stored_bytes=stored_bytes,
        )

    async def offer(self) -> list[str]:
        """Offer the current version to every actor below it; returns whom."""
        if self._published is None or self._broadcaster is None:
            return []
        version = self._published.version
        below = [
            lease.id
            for lease in await self._actors()
            if (lease.version, lease.lineage) != (version, self._lineage)
        ]
        await self._broadcaster.offer(version, self._lineage, below)
        return below

    async def close(self) -> None:
        """End broadcasts; what was published stays pullable."""
        if self._broadcaster is not None:
            await self._broadcaster.close()


async def _timed(work: Awaitable[T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = await work
    return result, time.perf_counter() - started
