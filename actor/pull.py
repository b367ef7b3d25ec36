"""Pulling a version: the newest anchor, or deltas upon the weights that are held."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.broker.delta import apply_delta
from headrace.broker.host_weights import HostWeights
from headrace.broker.weight_channel import CHUNK_BYTES, PurgedError, WeightChannel
from headrace.broker.weights import (
    ANCHOR,
    Head,
    Link,
    Manifest,
    bucket_ranges,
    check_bucket,
    supersedes,
)
from headrace.errors import WeightError

_RESTARTS = 5


@dataclass(frozen=True)
class Held:
    """Weights in host memory and the hash that names them."""

    weights: HostWeights
    weights_hash: str


class Puller:
    """Reads the pull chain. After a version that did not verify it starts from the anchor."""

    def __init__(self, channel: WeightChannel) -> None:
        self._channel = channel
        self._distrust = ""

    async def pull(
        self,
        served: tuple[int, int],
        held: Held | None,
        memory: Callable[[Manifest], HostWeights],
    ) -> tuple[Manifest, HostWeights, str] | None:
        """Fetch the newest version if it supersedes the served (version, lineage).

        Args:
            served: what the engine serves.
            held: its host copy, which deltas may build upon; it is not changed.
            memory: gives memory to receive into.

        Returns:
            manifest, verified weights and `anchor` or `delta`; None if there is nothing newer.

        Raises:
            WeightError: the stored version is corrupt or vanished again and again.
        """
        vanished: WeightError | None = None
        for _ in range(_RESTARTS):
            found = await self._channel.head()
            if found is None or not supersedes(found[0].version, found[0].lineage, served):
                return None
            try:
                return await self._pull(found[0], held, memory)
            except PurgedError as error:
                vanished = error
            except WeightError:
                self._distrust = held.weights_hash if held is not None else ""
                raise
        assert vanished is not None
        raise vanished

    async def _pull(
        self, head: Head, held: Held | None, memory: Callable[[Manifest], HostWeights]
    ) -> tuple[Manifest, HostWeights, str]:
        links = _missing(head, held if held and held.weights_hash != self._distrust else None)
        manifests = [await self._manifest(link) for link in links]
        weights = memory(manifests[-1])
        if links[0].kind != ANCHOR:
            assert held is not None
            if held.weights.layout != manifests[0].layout:
                raise WeightError(f"delta {links[0].version} is of other tensors than its base")
            await asyncio.to_thread(weights.flat.copy_, held.weights.flat)
        for link, manifest in zip(links, manifests, strict=True):
            if manifest.layout != weights.layout:
                raise WeightError(f"weights {link.version} are of other tensors than their base")
            await self._read(link, manifest, weights)
        await asyncio.to_thread(_verify, manifests[-1], weights)
        return manifests[-1], weights, links[0].kind

    async def _manifest(self, link: Link) -> Manifest:
        subject = self._channel.subject(link.kind, link.version, link.lineage)
        manifest = await self._channel.manifest(subject)
        named = (manifest.kind, manifest.version, manifest.lineage)
        if named != (link.kind, link.version, link.lineage) or (
            manifest.base_hash,
            manifest.weights_hash,
        ) != (link.base_hash, link.weights_hash):
            raise WeightError(f"the manifest at {subject} is not the one that the head names")
        return manifest

    async def _read(self, link: Link, manifest: Manifest, weights: HostWeights) -> None:
        if manifest.kind == ANCHOR:
            stored = weights.array()
        else:
            stored = np.empty(manifest.stored_bytes, np.uint8)
        if manifest.chunk_count != -(-stored.size // CHUNK_BYTES):
            raise WeightError(f"weights {link.version}: the chunks do not make up its bytes")
        async for part, data in self._channel.chunks(link, manifest):
            target = stored[part * CHUNK_BYTES : (part + 1) * CHUNK_BYTES]
            if target.size != len(data):
                raise WeightError(f"weights {link.version}: chunk {part} has the wrong size")
            target[:] = np.frombuffer(data, np.uint8)
        if manifest.kind != ANCHOR:
            await asyncio.to_thread(
                apply_delta, weights.array(), stored.tobytes(), manifest.bucket_bytes
            )


def _missing(head: Head, held: Held | None) -> list[Link]:
    """Links to read: those behind the held weights, or all from the anchor."""
    for index, link in enumerate(head.chain):
        if held is not None and link.kind != ANCHOR and link.base_hash == held.weights_hash:
            return head.chain[index:]
    return head.chain


def _verify(manifest: Manifest, weights: HostWeights) -> None:
    memory = weights.memory()
    ranges = bucket_ranges(manifest.layout.nbytes, manifest.bucket_bytes)
    for index, (start, end) in enumerate(ranges):
        check_bucket(manifest, index, memory[start:end])
