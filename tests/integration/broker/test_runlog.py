"""The run log on a real nats-server."""

import asyncio
import os
import signal
from pathlib import Path

import nats.errors
import pytest
from nats.js.errors import APIError, ServiceUnavailableError

from headrace.broker import server as servers
from headrace.broker.connection import (
    NO_RESOURCES,
    NO_SPACE,
    NO_STORAGE,
    Connection,
    connect,
    connected,
)
from headrace.broker.records import Failed, Issued, TaskRef, encode
from headrace.broker.runlog import Entry, RunLog
from headrace.broker.server import bundled_server, is_open, parse_url
from headrace.broker.subjects import RunNames
from headrace.errors import BrokerError, ConfigError, DeadlineError, FencedError, LogError

pytestmark = pytest.mark.nats
NAMES = RunNames("t")


def issued(ordinal: int) -> Issued:
    task = TaskRef(domain="d", level=0, split="train", index=ordinal, hash="h")
    return Issued(
        ordinal=ordinal, task=task, purpose="train", group_size=2, version=0, lineage=1,
        deadline=1e12, seed=ordinal, seen=0,
    )  # fmt: skip


def failed(group: int, index: int, kind: str = "no_actor") -> Failed:
    return Failed(
        group=group, index=index, attempt=1, actor="a", lineage=1, side="environment", kind=kind,
        evidence="",
    )  # fmt: skip


async def new_log(connection: Connection, max_bytes: int = 64 << 20) -> RunLog:
    return await RunLog.create(connection, NAMES, max_bytes=max_bytes)


async def test_read_returns_every_record_once_in_order(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        after = 0
        for ordinal in range(30):
            after = await log.append(issued(ordinal), after=after, message_id=f"i{ordinal}")
        position, seen = 0, []
        while entries := await log.read(position):
            position = entries[-1].seq
            seen += [entry.seq for entry in entries]
        assert seen == list(range(1, 31))
        assert await log.read(position) == []


async def test_a_reply_that_lost_a_record_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        for group in range(4):
            await log.decide(failed(group, 0), limit=9999, domain="d")
        whole, torn = log._direct_batch, 1

        async def tearing(start: int) -> list[Entry]:
            nonlocal torn
            entries = await whole(start)
            if torn:
                torn -= 1
                del entries[1]
            return entries

        monkeypatch.setattr(log, "_direct_batch", tearing)
        assert [entry.seq for entry in await log.read(0)] == [1, 2, 3, 4]
        torn = 2
        with pytest.raises(LogError, match=r"record 2 is missing .* fork a new run"):
            await log.read(0)


async def test_the_first_record_of_a_slot_decides_it(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        assert await log.decide(failed(3, 0), limit=9999, domain="d")
        assert not await log.decide(failed(3, 0, "other"), limit=9999, domain="d")
        assert await log.decide(failed(3, 0), limit=9999, domain="d"), "a retry of the same record"
        assert await log.decided(3) == {0}
        assert len(await log.read(0)) == 1


async def test_a_second_writer_is_fenced_and_a_retry_is_not(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        first = await log.append(issued(0), after=0, message_id="mine-0")
        assert await log.append(issued(0), after=0, message_id="mine-0") == first
        with pytest.raises(FencedError, match="another learner"):
            await log.append(issued(1), after=0, message_id="other-1")


async def test_the_fence_holds_after_all_records_of_a_subject_were_purged(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        first = await log.append(issued(0), after=0, message_id="mine-0")
        await log.decide(failed(0, 0), limit=9999, domain="d")
        await log.purge_to(2)
        second = await log.append(issued(1), after=first, message_id="mine-1")
        assert second == 3
        with pytest.raises(FencedError):
            await log.append(issued(2), after=first, message_id="other-2")


async def test_purge_keeps_what_lies_behind_the_position(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        for group in range(5):
            await log.decide(failed(group, 0), limit=9999, domain="d")
        await log.purge_to(0)
        assert (await log.info()).first_seq == 1
        await log.purge_to(3)
        assert [entry.seq for entry in await log.read(3)] == [4, 5]
        with pytest.raises(LogError, match="cannot purge to 6"):
            await log.purge_to(6)
        with pytest.raises(LogError, match="purged beyond"):
            await log.check_position(1)
        with pytest.raises(LogError, match="lost records"):
            await log.check_position(9)
        await log.check_position(3)


async def test_a_purge_outlasts_a_short_loss_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        for group in range(3):
            await log.decide(failed(group, 0), limit=9999, domain="d")
        purge = connection.js.purge_stream
        lost: list[object] = []

        async def lossy(name: str, *, seq: int) -> bool:
            if not lost:
                lost.append(seq)
                raise nats.errors.TimeoutError
            return await purge(name, seq=seq)

        monkeypatch.setattr(connection.js, "purge_stream", lossy)
        await log.purge_to(2)
        assert (await log.info()).first_seq == 3


async def test_a_replaced_stream_is_refused(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        await connection.js.delete_stream(NAMES.log_stream)
        await new_log(connection)
        with pytest.raises(LogError, match="was replaced"):
            await log.check_position(0)


async def test_a_full_log_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection, max_bytes=4096)
        accepted = 0

        async def fill() -> None:
            nonlocal accepted
            for group in range(100):
                await log.decide(failed(group, 0), limit=9999, domain="d")
                accepted += 1

        with pytest.raises(BrokerError, match=r"full.*log_bytes"):
            await fill()
        assert len(await log.read(0)) == accepted > 0


def refusing(error: APIError, times: int, connection: Connection):
    """A `publish` that is answered with an error at first."""
    publish, left = connection.js.publish, [error] * times

    async def refused(*arguments: object, **how: object) -> object:
        if left:
            raise left.pop()
        return await publish(*arguments, **how)  # type: ignore[arg-type]

    return refused


@pytest.mark.parametrize("code", [NO_RESOURCES, NO_SPACE, NO_STORAGE])
async def test_a_broker_without_room_is_one_clear_error_at_once(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        error = ServiceUnavailableError(code=503, err_code=code, description="no space left")
        monkeypatch.setattr(connection.js, "publish", refusing(error, 99, connection))
        with pytest.raises(BrokerError, match=r"no room left while .*no space left.*free space"):
            await log.decide(failed(0, 0), limit=9999, domain="d")


async def test_a_store_that_closes_is_not_full_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await new_log(connection)
        error = ServiceUnavailableError(code=503, err_code=NO_SPACE, description="store is closed")
        monkeypatch.setattr(connection.js, "publish", refusing(error, 2, connection))
        assert await log.decide(failed(0, 0), limit=9999, domain="d")


async def test_the_log_survives_a_killed_broker_and_the_reader_goes_on(tmp_path: Path) -> None:
    async with bundled_server(tmp_path) as server:
        port = int(server.url.rpartition(":")[2])
        connection = await connect(server.url, name="t", deadline_s=20)
        log = await new_log(connection)
        for group in range(4):
            await log.decide(failed(group, 0), limit=9999, domain="d")
        first = await log.read(0)
        os.kill(server.process.pid, signal.SIGKILL)
        await server.process.wait()
        async with bundled_server(tmp_path, port=port):
            await log.decide(failed(4, 0), limit=9999, domain="d")
            rest = await log.read(first[-1].seq)
            assert [e.seq for e in first + rest] == [1, 2, 3, 4, 5]
            assert rest[-1].data == encode(failed(4, 0))
            await connection.close()


async def test_an_unknown_run_is_named_after_the_deadline(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        with pytest.raises(DeadlineError, match="no run 't'"):
            await RunLog.attach(connection, NAMES, deadline_s=0.1)


async def test_an_unreachable_broker_is_named_after_the_deadline() -> None:
    with pytest.raises(BrokerError, match=r"no broker answers at .*headrace broker"):
        await connect("nats://127.0.0.1:9", name="t", deadline_s=0.3)


async def test_a_password_in_the_address_is_not_shown() -> None:
    with pytest.raises(BrokerError, match="no broker answers at nats://127") as caught:
        await connect("nats://me:secret@127.0.0.1:9", name="t", deadline_s=0.3)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="is not of the form") as refused:
        parse_url("http://me:secret@127.0.0.1:9")
    assert "secret" not in str(refused.value)


async def test_a_connection_shows_its_address_without_the_password(tmp_path: Path) -> None:
    async with bundled_server(tmp_path) as server:
        address = server.url.partition("://")[2]
        url = f"nats://me:secret@{address}"
        async with connected(url, name="t", deadline_s=30) as connection:
            assert connection.url == server.url


async def test_a_store_is_open_in_one_server_at_a_time(tmp_path: Path) -> None:
    async with bundled_server(tmp_path) as server:
        assert is_open(tmp_path)
        with pytest.raises(ConfigError, match=f"another nats-server has the store {tmp_path} open"):
            async with bundled_server(tmp_path):
                pass
        os.kill(server.process.pid, signal.SIGKILL)
        await server.process.wait()
        assert not is_open(tmp_path)
    async with bundled_server(tmp_path):
        pass


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    async with bundled_server(tmp_path / "a") as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with bundled_server(tmp_path / "b", port=port):
                pass


async def test_a_port_that_something_silent_took_in_between_is_a_clear_error(
    tmp_path: Path,
) -> None:
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert process.stdin is not None
        process.stdin.close()  # the server ends while the other one is asked
        await reader.read()
        writer.close()

    (tmp_path / "log").write_text("address already in use\n")
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(BrokerError, match="address already in use"):
            async with asyncio.timeout(60):
                await servers._wait_ready(process, "127.0.0.1", port, tmp_path / "log", 50)


async def test_a_connection_to_a_server_that_hangs_can_be_closed(tmp_path: Path) -> None:
    async with bundled_server(tmp_path) as server:
        connection = await connect(server.url, name="t", deadline_s=30)
        server.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(20):
                await connection.nc.publish("big", bytes(1 << 20))
            await asyncio.wait_for(connection.close(), 60)
        finally:
            server.process.send_signal(signal.SIGCONT)


async def test_another_address_needs_credentials(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without credentials"):
        async with bundled_server(tmp_path, host="0.0.0.0"):
            pass


@pytest.mark.parametrize("folder", ["auth", 'auf "dem" Weg'])
async def test_who_knows_the_credentials_is_let_in_and_nobody_else(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "auth.conf"
    file.write_text('authorization { user: run, password: "s3cret" }\n')
    async with bundled_server(tmp_path / "nats", host="0.0.0.0", credentials=str(file)) as server:
        address = server.url.removeprefix("nats://").replace("0.0.0.0", "127.0.0.1")
        async with connected(f"nats://run:s3cret@{address}", name="t", deadline_s=30):
            pass
        for who in ("", "run:wrong@"):
            with pytest.raises(BrokerError, match="refuses the credentials"):
                async with connected(f"nats://{who}{address}", name="t", deadline_s=30):
                    pass


async def test_credentials_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auth\.conf: no such file"):
        async with bundled_server(tmp_path, credentials=str(tmp_path / "auth.conf")):
            pass


async def test_every_write_is_synced(tmp_path: Path) -> None:
    async with bundled_server(tmp_path):
        assert "sync_interval: always" in (tmp_path / "nats-server.conf").read_text()


async def test_a_store_may_lie_in_a_folder_of_any_name(tmp_path: Path) -> None:
    async with bundled_server(tmp_path / 'Größe "und" Maß') as server:
        assert server.url
