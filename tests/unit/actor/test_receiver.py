"""What the receiver serves when a pull and a broadcast end together."""

import asyncio
import time
from typing import cast

import pytest
import torch

from headrace.actor.engine import ApplyReport
from headrace.actor.receiver import WeightReceiver, _Round
from headrace.broker.connection import Connection
from headrace.broker.host_weights import HostWeights, layout_of
from headrace.broker.subjects import RunNames
from headrace.broker.weights import ANCHOR, Manifest, Prepare, weights_hash
from headrace.config import Weights
from headrace.errors import WeightError
from headrace.learner.publisher import WeightPublisher

NAMES = RunNames("t")
NOWHERE = cast("Connection", None)
LAYOUT = layout_of({"a": torch.zeros(4)})


class GatedEngine:
    """Applies one version after the other, as the engine does, once it is let."""

    def __init__(self) -> None:
        self.asked, self.gate = asyncio.Event(), asyncio.Event()
        self.versions: list[int] = []
        self._lock = asyncio.Lock()

    async def apply(self, weights: HostWeights, *, version: int) -> ApplyReport:
        self.asked.set()
        async with self._lock:
            await self.gate.wait()
            self.versions.append(version)
        return ApplyReport(0.0, 0.0)


def manifest(version: int) -> Manifest:
    hashes = [bytes([version]) * 32]
    return Manifest(
        version=version, lineage=1, kind=ANCHOR, base_hash="", layout=LAYOUT, bucket_bytes=64,
        bucket_hashes=hashes, weights_hash=weights_hash(LAYOUT, hashes), chunk_count=1,
        stored_bytes=LAYOUT.nbytes,
    )  # fmt: skip


async def test_an_older_pull_that_ends_beside_a_broadcast_is_not_applied_after_it() -> None:
    engine = GatedEngine()
    receiver = WeightReceiver(NOWHERE, NAMES, engine, ident="a")
    applying = [
        asyncio.create_task(receiver._apply(manifest(version), HostWeights(LAYOUT), way, 0.0))
        for version, way in ((6, "broadcast"), (5, "anchor"))
    ]
    await engine.asked.wait()
    engine.gate.set()
    await asyncio.gather(*applying)
    assert engine.versions == [6]
    assert receiver.version == 6


async def test_a_round_whose_weights_are_being_applied_does_not_expire() -> None:
    async def arrived() -> HostWeights:
        return HostWeights(LAYOUT)

    engine = GatedEngine()
    receiver = WeightReceiver(NOWHERE, NAMES, engine, ident="a", round_s=1.0)
    receiving = asyncio.create_task(arrived())
    await receiving
    receiver._round = _Round(manifest(1), time.monotonic() - 9.0, receiving)
    finishing = asyncio.create_task(receiver._finish_round())
    await engine.asked.wait()
    receiver._expire_round()
    with pytest.raises(WeightError, match="still open"):
        await receiver._handle(Prepare(version=2, lineage=1, subject="s"))
    engine.gate.set()
    await finishing
    assert receiver.version == 1
    assert receiver._round is None


def test_both_ends_broadcast_on_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> list[torch.device]:
        receiver = WeightReceiver(NOWHERE, NAMES, GatedEngine(), ident="a")
        publisher = WeightPublisher(NOWHERE, NAMES, Weights(), lineage=1)
        return [receiver._device, publisher._device]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices() == [torch.device("cpu")] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert devices() == [torch.device("cuda", 3)] * 2
