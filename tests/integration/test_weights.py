"""The weight path on a real nats-server and gloo."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest
import torch

from headrace.actor import receiver
from headrace.actor.pull import Held, Puller
from headrace.broker import leases
from headrace.broker.broadcast import BroadcastGroup, open_store
from headrace.broker.connection import Connection, connected
from headrace.broker.host_weights import HostWeights
from headrace.broker.records import decode, encode
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.broker.weight_channel import CHUNK_BYTES, WeightChannel
from headrace.broker.weights import (
    Answer,
    Begin,
    Join,
    Link,
    Manifest,
    Prepare,
)
from headrace.config import Weights
from headrace.errors import ConfigError, DeadlineError, EngineError, FencedError, WeightError
from headrace.learner import broadcaster
from headrace.learner.publisher import WeightPublisher
from tests.integration.weight_actor import (
    LEASE_S,
    ROUND_S,
    WAIT_S,
    HandMadePeer,
    actor,
    announce,
)
from tests.unit.processes import wait_until

pytestmark = pytest.mark.nats
NAMES = RunNames("w")
SETTINGS = Weights(bucket_bytes=1 << 18, anchor_every=3, round_s=ROUND_S)
CPU = torch.device("cpu")
SCRIPT = Path(__file__).with_name("weight_actor.py")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "TTL_S", LEASE_S)


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let actors pull only when they start and when told to: one that is pulling joins no round."""
    monkeypatch.setattr(receiver, "_POLL_S", LEASE_S)


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[Connection]:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=WAIT_S) as connection,
    ):
        await leases.create(connection, NAMES)
        yield connection


@contextlib.asynccontextmanager
async def publishing(connection: Connection, lineage: int = 1) -> AsyncIterator[WeightPublisher]:
    publisher = WeightPublisher(connection, NAMES, SETTINGS, lineage=lineage, device=CPU)
    try:
        yield publisher
    finally:
        await publisher.close()


def model(version: int, size: int = 100_000) -> dict[str, torch.Tensor]:
    """Weights of a version: a few values change from one to the next."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(size, 3, generator=generator).bfloat16(),
        "b": torch.randn(77, generator=generator).bfloat16(),
        "c": torch.randn(size, generator=generator),
    }
    tensors["a"][:500] += version
    tensors["b"][version % 77] = 9
    return tensors


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


async def test_a_version_is_published_without_actors_and_pulled_by_one_that_comes_later(
    connection: Connection,
) -> None:
    async with publishing(connection) as publisher:
        for version in range(3):
            report = await publisher.publish(version, model(version))
            assert report.reached == []
        async with actor(connection, NAMES, "late") as late:
            await late.receiver.wait_for(2, deadline_s=WAIT_S)
            assert same(late.engine.tensors, model(2))
            assert late.engine.versions == [2], "an actor goes straight to the newest"


async def test_a_receiver_can_be_left_though_its_pull_swallows_a_cancellation(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def deaf(*_: object) -> None:
        first = not begun.is_set()
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not first:
                raise

    monkeypatch.setattr(Puller, "pull", deaf)
    async with asyncio.timeout(WAIT_S):
        async with actor(connection, NAMES, "a"):
            await begun.wait()


@pytest.mark.usefixtures("no_poll")
async def test_members_get_the_broadcast_and_a_group_is_built_only_when_they_change(
    connection: Connection,
) -> None:
    async with publishing(connection) as publisher, actor(connection, NAMES, "a") as a:
        first = await publisher.publish(0, model(0))
        second = await publisher.publish(1, model(1))
        assert first.reached == second.reached == ["a"]
        assert first.membership == second.membership
        async with actor(connection, NAMES, "b") as b:
            await b.receiver.wait_for(1, deadline_s=WAIT_S)
            third = await publisher.publish(2, model(2))
            assert third.reached == ["a", "b"]
            assert third.membership != second.membership
            for one in (a, b):
                await one.receiver.wait_for(2, deadline_s=WAIT_S)
                assert same(one.engine.tensors, model(2))
                assert one.received[-1].way == "broadcast"


async def test_a_version_is_published_though_the_leases_cannot_be_read(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unread(*_: object) -> list[leases.Lease]:
        raise nats.errors.TimeoutError

    async with publishing(connection) as publisher, actor(connection, NAMES, "a") as a:
        monkeypatch.setattr(leases, "alive", unread)
        assert (await publisher.publish(0, model(0))).reached == []
        assert await publisher.offer() == []
        await a.receiver.wait_for(0, deadline_s=WAIT_S)
        assert same(a.engine.tensors, model(0))


async def test_deltas_are_pulled_upon_what_is_held_and_anchors_bound_the_chain(
    connection: Connection,
) -> None:
    async with publishing(connection) as publisher:
        await publisher.publish(0, model(0))
        puller = Puller(WeightChannel(connection, NAMES))
        ways, kinds, held, served = [], [], None, (-1, -1)
        for version in range(1, 9):
            kinds.append((await publisher.publish(version, model(version))).kind)
            pulled = await puller.pull(served, held, lambda m: HostWeights(m.layout))
            assert pulled is not None
            manifest, weights, way = pulled
            assert same(weights.tensors(), model(version))
            held, served = Held(weights, manifest.weights_hash), (version, 1)
            ways.append(way)
        assert kinds == ["delta", "delta", "anchor", "delta", "delta", "anchor", "delta", "delta"]
        assert ways == ["anchor", *kinds[1:]]
        assert await puller.pull(served, held, lambda m: HostWeights(m.layout)) is None
        assert held is not None
        info = await connection.js.stream_info(NAMES.weights_stream)
        assert info.state.bytes < 1.3 * held.weights.layout.nbytes, "old anchors are purged"


async def test_a_version_in_which_most_words_changed_is_stored_whole(
    connection: Connection,
) -> None:
    async with publishing(connection) as publisher:
        await publisher.publish(0, model(0))
        changed = {name: tensor * 1.01 for name, tensor in model(0).items()}
        report = await publisher.publish(1, changed)
        assert (report.kind, report.stored_bytes) == ("anchor", report.total_bytes)
        async with actor(connection, NAMES, "late") as late:
            await late.receiver.wait_for(1, deadline_s=WAIT_S)
            assert same(late.engine.tensors, changed)


async def test_a_delta_is_never_applied_to_another_base(connection: Connection) -> None:
    async with publishing(connection) as publisher:
        await publisher.publish(0, model(0))
        await publisher.publish(1, model(1))
        puller = Puller(WeightChannel(connection, NAMES))
        other = Held(HostWeights.of(model(7)), "another hash")
        pulled = await puller.pull((0, 1), other, lambda m: HostWeights(m.layout))
        assert pulled is not None
        assert pulled[2] == "anchor", "a base that the delta does not name is not built upon"
        head = await WeightChannel(connection, NAMES).head()
        assert head is not None
        damaged = Held(HostWeights.of(model(7)), head[0].chain[0].weights_hash)
        with pytest.raises(WeightError, match="does not match its hash"):
            await puller.pull((0, 1), damaged, lambda m: HostWeights(m.layout))
        pulled = await puller.pull((0, 1), damaged, lambda m: HostWeights(m.layout))
        assert pulled is not None
        assert pulled[2] == "anchor", "a base that did not verify is not built upon again"
        assert same(pulled[1].tensors(), model(1))


class DamagingChannel(WeightChannel):
    """Flips one bit of what a publisher stores, as a broken disk or network might."""

    async def put_chunks(self, manifest: Manifest, chunks: list[memoryview]) -> None:  # type: ignore[override]
        spoiled = bytearray(chunks[0])
        spoiled[len(spoiled) // 2] ^= 1
        await super().put_chunks(manifest, [memoryview(spoiled), *chunks[1:]])


async def test_a_corrupt_chunk_is_refused_and_the_old_version_goes_on_serving(
    connection: Connection,
) -> None:
    async with actor(connection, NAMES, "a") as a, publishing(connection) as publisher:
        await publisher.publish(0, model(0))
        await a.receiver.wait_for(0, deadline_s=WAIT_S)
        await leases.release(connection, NAMES, "actor", "a")  # so that it must pull
        publisher._channel = DamagingChannel(connection, NAMES)
        await publisher.publish(1, model(30))
        await announce(connection, NAMES, "a")
        assert await publisher.offer() == ["a"]
        await asyncio.to_thread(wait_until, lambda: bool(a.receiver._trouble))
        with pytest.raises(DeadlineError, match=r"serves 0 \(lineage 1\); .*(hash|delta)"):
            await a.receiver.wait_for(1, deadline_s=0.1)
        assert same(a.engine.tensors, model(0))
        async with publishing(connection, lineage=2) as successor:
            await successor.publish(1, model(1))
            await a.receiver.wait_for(1, lineage=2, deadline_s=WAIT_S)
        assert same(a.engine.tensors, model(1))
        assert a.engine.versions == [0, 1]


class PurgedUnderneath(WeightChannel):
    """Lets two more versions be published, and the old ones purged, before the first chunk."""

    publisher: WeightPublisher | None = None

    async def chunks(self, link: Link, manifest: Manifest) -> AsyncIterator[tuple[int, bytes]]:
        if self.publisher is not None:
            publisher, self.publisher = self.publisher, None
            for version in range(1, 4):
                await publisher.publish(version, model(version))
        async for item in super().chunks(link, manifest):
            yield item


async def test_a_version_that_is_purged_while_it_is_pulled_gives_way_to_the_newest(
    connection: Connection,
) -> None:
    async with publishing(connection) as publisher:
        await publisher.publish(0, model(0))
        channel = PurgedUnderneath(connection, NAMES)
        channel.publisher = publisher
        pulled = await Puller(channel).pull((-1, -1), None, lambda m: HostWeights(m.layout))
        assert pulled is not None
        assert pulled[0].version == 3
        assert same(pulled[1].tensors(), model(3))


async def test_a_newer_learner_fences_the_older_and_versions_stay_monotone(
    connection: Connection,
) -> None:
    async with (
        actor(connection, NAMES, "a") as a,
        publishing(connection, 1) as old,
        publishing(connection, 2) as new,
    ):
        await old.publish(0, model(0))
        await old.publish(1, model(1))
        report = await new.publish(1, model(1))
        assert report.kind == "anchor", "a new lineage starts from whole weights"
        await a.receiver.wait_for(1, lineage=2, deadline_s=WAIT_S)
        with pytest.raises(FencedError, match="another learner"):
            await old.publish(2, model(5))
        await new.publish(2, model(2))
        await a.receiver.wait_for(2, lineage=2, deadline_s=WAIT_S)
        assert same(a.engine.tensors, model(2))
        served = [(item.version, item.lineage) for item in a.received]
        assert served == sorted(served)


async def test_an_engine_that_fails_to_apply_ends_the_receiver(connection: Connection) -> None:
    async with publishing(connection) as publisher, actor(connection, NAMES, "a") as a:
        await publisher.publish(0, model(0))
        await a.receiver.wait_for(0, deadline_s=WAIT_S)
        a.engine.fails = True
        await publisher.publish(1, model(1))
        with pytest.raises(EngineError):
            await a.receiver.wait_for(1, deadline_s=WAIT_S)
        with pytest.raises(EngineError):
            await a.receiver.failed()


async def has_lease(connection: Connection, ident: str) -> None:
    watch = await connection.nc.subscribe(NAMES.lease("actor", ident))
    if ident not in {lease.id for lease in await leases.alive(connection, NAMES)}:
        await watch.next_msg(timeout=WAIT_S)
    await watch.unsubscribe()


@pytest.mark.slow
@pytest.mark.usefixtures("no_poll")
async def test_a_peer_killed_in_the_middle_of_the_buckets_costs_a_pull_and_nothing_else(
    connection: Connection,
) -> None:
    dying, healthy = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(SCRIPT), role, connection.url, NAMES.run
        )
        for role in ("die", "serve")
    ]
    try:
        async with publishing(connection) as publisher, actor(connection, NAMES, "a") as a:
            await has_lease(connection, "dying")
            await has_lease(connection, "process")
            async with asyncio.timeout(WAIT_S):
                broken = await publisher.publish(0, model(0, size=2_000_000))
            assert broken.reached == []
            assert "a" in broken.offered
            assert await asyncio.wait_for(dying.wait(), WAIT_S) == -signal.SIGKILL
            await a.receiver.wait_for(0, deadline_s=WAIT_S)
            assert a.received[-1].way == "anchor"
            assert same(a.engine.tensors, model(0, size=2_000_000))
            whole = await publisher.publish(1, model(1, size=2_000_000))
            assert "a" in whole.reached
            assert whole.membership != broken.membership
            await a.receiver.wait_for(1, deadline_s=WAIT_S)
            assert a.received[-1].way == "broadcast"
    finally:
        for process in (dying, healthy):
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.usefixtures("no_poll")
async def test_an_actor_that_comes_in_the_middle_of_a_round_pulls_that_version(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "_JOIN_S", ROUND_S)  # a bucket may wait as long
    async with publishing(connection) as publisher:
        await publisher.publish(0, model(0))
        peer = HandMadePeer(connection, NAMES, "slow")
        await peer.listen()
        round_ = asyncio.create_task(publisher.publish(1, model(1)))
        await asyncio.wait_for(peer.begun.wait(), WAIT_S)
        async with actor(connection, NAMES, "joins") as joins:
            await joins.receiver.wait_for(0, deadline_s=WAIT_S)
            assert not round_.done()
            peer.go.set()
            report = await round_
            assert report.reached == ["slow"]
            await publisher.offer()
            await joins.receiver.wait_for(1, deadline_s=WAIT_S)
            assert joins.engine.versions == [0, 1]
            assert same(joins.engine.tensors, model(1))


async def test_a_learner_that_dies_in_a_round_does_not_keep_its_actors_from_pulling(
    connection: Connection,
) -> None:
    async with publishing(connection) as publisher, actor(connection, NAMES, "a") as a:
        await leases.release(connection, NAMES, "actor", "a")
        await publisher.publish(0, model(0))
        await a.receiver.wait_for(0, deadline_s=WAIT_S)
        channel = WeightChannel(connection, NAMES)
        head = await channel.head()
        assert head is not None
        stored = await channel.manifest(channel.subject("anchor", 0, 1))
        promised = Manifest(
            version=1, lineage=1, kind="anchor", base_hash="", layout=stored.layout,
            bucket_bytes=stored.bucket_bytes, bucket_hashes=stored.bucket_hashes,
            weights_hash=stored.weights_hash, chunk_count=1, stored_bytes=CHUNK_BYTES,
        )  # fmt: skip
        await channel.put_manifest(promised)
        store = open_store("127.0.0.1", timeout_s=ROUND_S)

        async def ask(question: Prepare | Join | Begin) -> Answer:
            reply = await connection.nc.request(
                NAMES.control("a"), encode(question), timeout=WAIT_S
            )
            return decode(reply.data, Answer, where="a")

        subject = channel.subject("anchor", 1, 1)
        assert (await ask(Prepare(version=1, lineage=1, subject=subject))).ok
        building = asyncio.to_thread(
            BroadcastGroup,
            store,
            epoch="9.9",
            rank=0,
            size=2,
            address="127.0.0.1",
            timeout_s=ROUND_S,
            device=CPU,
        )
        join = Join(
            epoch="9.9", rank=1, size=2, host="127.0.0.1", port=store.port, timeout_s=ROUND_S
        )
        group, joined = await asyncio.gather(building, ask(join))
        assert joined.ok
        assert (await ask(Begin(epoch="9.9", version=1, lineage=1))).ok
        group.close()  # the learner is gone; the successor publishes
        async with publishing(connection, lineage=2) as successor:
            await successor.publish(1, model(1))
            await a.receiver.wait_for(1, lineage=2, deadline_s=WAIT_S)
        assert same(a.engine.tensors, model(1))


async def test_an_interface_that_is_not_here_is_named(connection: Connection) -> None:
    settings = Weights(interface="203.0.113.1")
    with pytest.raises(ConfigError, match=r"weights\.interface '203\.0\.113\.1'"):
        await WeightPublisher(connection, NAMES, settings, lineage=1).publish(0, model(0))
