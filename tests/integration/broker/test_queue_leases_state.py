"""Task queue, leases and run state on a real nats-server."""

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import nats.errors
import nats.js.errors
import pytest
from nats.js.client import JetStreamContext

from headrace.broker import leases
from headrace.broker.connection import Connection, connect, connected
from headrace.broker.records import Issued, TaskRef, encode
from headrace.broker.server import bundled_server
from headrace.broker.state import Current, RunState
from headrace.broker.subjects import RunNames
from headrace.broker.taskqueue import HeldTask, TaskQueue
from headrace.errors import FencedError, RunMismatchError

pytestmark = pytest.mark.nats
NAMES = RunNames("t")


def issued(ordinal: int) -> Issued:
    task = TaskRef(domain="d", level=0, split="train", index=ordinal, hash="h")
    return Issued(
        ordinal=ordinal, task=task, purpose="train", group_size=2, version=0, lineage=1,
        deadline=1e12, seed=ordinal, seen=0,
    )  # fmt: skip


async def test_a_task_is_held_by_one_actor_until_it_is_done(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        queue = TaskQueue(connection, NAMES)
        await queue.create(["p"], ack_wait_s=30)
        await queue.put(issued(7), pool="p", delivery="1.0")
        await queue.put(issued(7), pool="p", delivery="1.0")
        held = await queue.take("p", wait_s=20)
        assert held is not None
        assert held.issued == issued(7)
        assert await queue.take("p", wait_s=0.1) is None, "the same task was stored once"
        assert await queue.groups() == {7}
        assert await queue.depths(["p"]) == {"p": (0, 1)}
        await held.hand_back()
        again = await queue.take("p", wait_s=20)
        assert again is not None
        await again.done()
        async with asyncio.timeout(60):  # an acknowledgement is not answered
            while await queue.groups():
                pass


async def test_a_task_without_heartbeat_goes_to_another_actor(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        queue = TaskQueue(connection, NAMES)
        await queue.create(["p"], ack_wait_s=1)
        await queue.put(issued(0), pool="p", delivery="1.0")
        assert await queue.take("p", wait_s=20) is not None
        assert await queue.take("p", wait_s=20) is not None


async def test_started_attempts_are_counted_per_group(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        queue = TaskQueue(connection, NAMES)
        await queue.create(["p"], ack_wait_s=30)
        assert [await queue.begin(1), await queue.begin(1), await queue.begin(2)] == [1, 2, 1]


async def test_a_start_whose_answer_was_lost_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        queue = TaskQueue(connection, NAMES)
        await queue.create(["p"], ack_wait_s=30)
        publish = connection.js.publish
        lost: list[object] = []

        async def lossy(*args: object, **options: object) -> object:
            ack = await publish(*args, **options)  # type: ignore[arg-type]
            if not lost:
                lost.append(ack)
                raise nats.errors.TimeoutError
            return ack

        monkeypatch.setattr(connection.js, "publish", lossy)
        assert await queue.begin(1) == 1
        assert lost
        assert await queue.begin(1) == 2


@pytest.mark.parametrize(
    "error", [TimeoutError, nats.errors.TimeoutError, nats.js.errors.FetchTimeoutError]
)
async def test_an_empty_pool_is_no_error_in_whatever_way_the_client_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        queue = TaskQueue(connection, NAMES)
        await queue.create(["p"], ack_wait_s=30)
        fetch = JetStreamContext.PullSubscription.fetch

        async def empty(
            pull: JetStreamContext.PullSubscription, batch: int, timeout: float
        ) -> None:
            with contextlib.suppress(TimeoutError):
                await fetch(pull, batch, timeout=timeout)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(JetStreamContext.PullSubscription, "fetch", empty)
            assert await queue.take("p", wait_s=0.1) is None
            await queue.stop_taking()
        await queue.put(issued(1), pool="p", delivery="0")
        assert await queue.take("p", wait_s=20) is not None


async def test_a_task_that_came_too_late_to_be_taken_goes_to_another_actor_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        queue, other = TaskQueue(connection, NAMES), TaskQueue(connection, NAMES)
        await queue.create(["p"], ack_wait_s=30)
        taking = asyncio.ensure_future(queue.take("p", wait_s=60))
        async with asyncio.timeout(60):
            while not await waiting(connection):
                pass
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await queue.put(issued(1), pool="p", delivery="0")
        flush = connection.nc.flush

        async def late(timeout: int) -> None:
            await flush(timeout)
            raise nats.errors.FlushTimeoutError

        with monkeypatch.context() as patch:
            patch.setattr(connection.nc, "flush", late)
            with pytest.raises(nats.errors.FlushTimeoutError):
                await queue.stop_taking()
        assert await other.take("p", wait_s=20) is not None


@pytest.mark.parametrize("turns", [1, 2, 5, 50])
async def test_what_is_handed_back_goes_to_another_actor_before_what_waits(
    tmp_path: Path, turns: int
) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
        connected(server.url, name="o", deadline_s=30) as second,
    ):
        queue, other = TaskQueue(connection, NAMES), TaskQueue(second, NAMES)
        await queue.create(["p"], ack_wait_s=60)
        for ordinal in range(100):
            await queue.put(issued(ordinal), pool="p", delivery="0")
        held = [await queue.take("p", wait_s=20) for _ in range(3)]
        taking = asyncio.ensure_future(queue.take("p", wait_s=20))
        for _ in range(turns):  # so that the request is cancelled in each of its stages
            await asyncio.sleep(0)
        taking.cancel()
        (late,) = await asyncio.gather(taking, return_exceptions=True)
        if isinstance(late, HeldTask):
            held.append(late)
        await queue.stop_taking([task for task in held if task is not None])
        await connection.nc.flush()
        taken = [await other.take("p", wait_s=20) for _ in range(100)]
        order = [task.issued.ordinal for task in taken if task is not None]
        assert sorted(order) == list(range(100))
        # the broker may serve a request before it comes to what was handed back
        assert {0, 1, 2} <= set(order[:10])


async def waiting(connection: Connection) -> int:
    info = await connection.js.consumer_info(NAMES.tasks_stream, NAMES.pool_consumer("p"))
    return info.num_waiting or 0


async def test_a_pool_that_the_run_does_not_have_is_named(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        queue = TaskQueue(connection, NAMES)
        await queue.create(["p"], ack_wait_s=30)
        with pytest.raises(RunMismatchError, match="run 't' has no pool 'q'"):
            await queue.depths(["p", "q"])


LEASE = leases.Lease(role="actor", id="a1", pid=1, host="h", started=0.0, status="sampling")


async def test_a_lease_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        await leases.create(connection, NAMES)
        await leases.renew(connection, NAMES, LEASE)
        foreign = encode(msgspec.structs.replace(LEASE, protocol=99))
        await connection.js.publish(NAMES.lease("actor", "a0"), foreign)
        await connection.js.publish(NAMES.lease("learner", "l"), b"not a record")
        assert await leases.alive(connection, NAMES) == [LEASE]


async def test_a_lease_is_renewed_on_a_broker_that_forgot_the_stream(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        await leases.create(connection, NAMES)
        await connection.js.delete_stream(NAMES.lease_stream)
        await leases.renew(connection, NAMES, LEASE)
        assert await leases.alive(connection, NAMES) == [LEASE]


async def test_a_lease_is_listed_until_released(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        await leases.create(connection, NAMES)
        assert await leases.alive(connection, NAMES) == []
        lease = leases.Lease(
            role="actor", id="a1", pid=1, host="h", started=0.0, status="sampling", version=3
        )
        await leases.renew(connection, NAMES, lease)
        assert await leases.alive(connection, NAMES) == [lease]
        await leases.release(connection, NAMES, "actor", "a1")
        assert await leases.alive(connection, NAMES) == []


async def test_a_lease_expires_when_it_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "TTL_S", 1)
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        await leases.create(connection, NAMES)
        lease = leases.Lease(role="actor", id="a", pid=1, host="h", started=0.0, status="x")
        await leases.renew(connection, NAMES, lease)
        async with asyncio.timeout(60):
            while await leases.alive(connection, NAMES):
                pass


async def test_the_lineage_rises_by_one_and_fences_the_older_learner(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        state = RunState(connection, NAMES)
        await state.create()
        assert await state.current() is None
        assert await state.raise_lineage() == 1
        await state.check_lineage(1)
        assert await state.raise_lineage() == 2
        with pytest.raises(FencedError, match="lineage 1 was replaced by 2"):
            await state.check_lineage(1)
        lineages = await asyncio.gather(*(state.raise_lineage() for _ in range(5)))
        assert sorted(lineages) == [3, 4, 5, 6, 7]


async def test_model_files_and_the_current_version_travel_through_the_broker(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_bytes(b"x" * 3_000_000)
    (folder / "model.safetensors").write_bytes(b"not sent")
    async with (
        bundled_server(tmp_path / "nats") as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        state = RunState(connection, NAMES)
        await state.create()
        await state.set_current(Current(lineage=1, version=2))
        assert await RunState(connection, NAMES).current() == Current(lineage=1, version=2)
        await state.put_model_files(folder)
        await state.fetch_model_files(tmp_path / "copy")
        assert {p.name for p in (tmp_path / "copy").iterdir()} == {"config.json", "tokenizer.json"}
        assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == b"x" * 3_000_000


async def test_what_a_run_keeps_beside_its_log_outlasts_a_short_loss_of_the_broker(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    async with bundled_server(tmp_path / "nats") as server:
        port = int(server.url.rpartition(":")[2])
        connection = await connect(server.url, name="t", deadline_s=30)
        # one request waits for less than the broker is away
        hasty = replace(connection, js=connection.nc.jetstream(timeout=0.5))
        state, other = RunState(hasty, NAMES), RunState(hasty, RunNames("other"))
        await state.create()
        await other.put_model_files(folder)
        os.kill(server.process.pid, signal.SIGKILL)
        await server.process.wait()
        work = asyncio.gather(
            state.raise_lineage(),
            state.put_model_files(folder),
            other.fetch_model_files(tmp_path / "copy"),
        )
        await asyncio.wait({work}, timeout=1.5)
        async with bundled_server(tmp_path / "nats", port=port):
            lineage, *_ = await asyncio.wait_for(work, 30)
            assert lineage >= 1
            assert await state.get("lineage") == str(lineage).encode()
            await state.fetch_model_files(tmp_path / "again")
            await connection.close()
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"
    assert (tmp_path / "again" / "config.json").read_text() == "{}"
