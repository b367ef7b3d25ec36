"""`headrace status` on a real broker."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import nats.errors
import pytest

from headrace.broker import connection as connections
from headrace.broker import leases
from headrace.broker.connection import Connection, connected
from headrace.broker.runlog import RunLog
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.broker.taskqueue import TaskQueue
from headrace.cli import status
from headrace.config import Config, load
from headrace.errors import DeadlineError
from headrace.monitor.progress import Progress, write_progress

pytestmark = pytest.mark.nats
NAMES = RunNames("t")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command waits briefly, for a broker that may be down; here it always answers."""

    def patiently(url: str, *, name: str, **_: float) -> AbstractAsyncContextManager[Connection]:
        return connected(url, name=name, deadline_s=30)

    monkeypatch.setattr(connections, "connected", patiently)


@pytest.fixture
async def config(tmp_path: Path) -> AsyncIterator[Config]:
    async with (
        bundled_server(tmp_path / "broker") as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        await leases.create(connection, NAMES)
        await TaskQueue(connection, NAMES).create(["default"], ack_wait_s=30)
        await RunLog.create(connection, NAMES, max_bytes=64 << 20)
        yield load([], [f"run.dir={tmp_path}", "run.name=t", f"broker.url={server.url}"])


async def test_the_outstanding_groups_are_shown(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    write_progress(Path(config.run.dir), Progress(issued=31, trained=24, filtered=2))
    found = await status._status(config)
    assert found["window"]["outstanding"] == 5
    status._show(found)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"5 of at most {found['window']['limit']} outstanding" in shown


async def test_what_a_process_says_of_itself_is_shown_as_text(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await status._status(config)
    process = dict.fromkeys(("role", "id", "pid", "status", "version", "held"), "")
    said = "[/tmp/x] :boom: \x1b[2J"
    found["processes"] = [process | {"detail": said, "alive_s": 1.0}]
    status._show(found)
    shown = "".join(capsys.readouterr().out.split())
    assert "[/tmp/x]:boom:\\x1b[2J" in shown


async def test_a_lost_answer_about_the_leases_is_asked_for_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = leases.alive
    lost: list[object] = []

    async def lossy(*args: object) -> list[leases.Lease]:
        if not lost:
            lost.append(args)
            raise nats.errors.TimeoutError
        return await alive(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(leases, "alive", lossy)
    assert (await status._status(config))["processes"] == []
    assert lost


async def test_a_broker_that_does_not_know_the_run_yields_what_the_folder_says(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name="other"))
    monkeypatch.setattr(status, "resolve", lambda _items: other)
    arguments = argparse.Namespace(items=[], json=True)
    with pytest.raises(DeadlineError, match="'other'"):
        await asyncio.to_thread(status.run, arguments)
    write_progress(Path(config.run.dir), Progress(steps=3, phase="training"))
    assert await asyncio.to_thread(status.run, arguments) == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "stopped"
