"""Reading a run's history while it runs, and when its own broker is down or does not answer."""

import logging
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.broker.connection import connected
from headrace.broker.records import Failed
from headrace.broker.runlog import Entry, RunLog
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.config import Config, load
from headrace.learner import history
from headrace.learner.archive import Archive

pytestmark = pytest.mark.nats
NAMES = RunNames("t")
RECORDS, ARCHIVED = 6, 3


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_ANSWER_S", 30.0)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    """For tests whose broker is down or silent: the wait for it passes in full."""
    monkeypatch.setattr(history, "_ANSWER_S", 0.5)


def config_of(run_dir: Path, url: str) -> Config:
    return load([], [f"run.dir={run_dir}", "run.name=t", f"broker.url={url}"])


async def decide_all(log: RunLog) -> None:
    for group in range(RECORDS):
        record = Failed(
            group=group, index=0, attempt=1, actor="a", lineage=1, side="environment",
            kind="no_actor", evidence="",
        )  # fmt: skip
        await log.decide(record, limit=9999, domain="d")


async def archived(log: RunLog, run_dir: Path) -> Archive:
    archive = Archive(run_dir / "archive", log.identity)
    for entry in (await log.read(0))[:ARCHIVED]:
        archive.add(entry)
    await archive.flush()
    return archive


async def stopped_run(run_dir: Path) -> None:
    """A run whose broker is down: some records in the archive, all in the store."""
    async with (
        bundled_server(run_dir / "broker") as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await RunLog.create(connection, NAMES, max_bytes=64 << 20)
        await decide_all(log)
        await archived(log, run_dir)


async def numbers(entries: AsyncIterator[Entry]) -> list[int]:
    return [entry.seq async for entry in entries]


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"nats://127.0.0.1:{probe.getsockname()[1]}"


async def test_what_is_purged_during_the_reading_is_read_from_the_archive(tmp_path: Path) -> None:
    async with (
        bundled_server(tmp_path / "broker") as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await RunLog.create(connection, NAMES, max_bytes=64 << 20)
        await decide_all(log)
        archive = await archived(log, tmp_path)
        seen = []
        async for entry in history.read_history(config_of(tmp_path, server.url)):
            seen.append(entry.seq)
            if entry.seq == ARCHIVED:
                # the learner goes on: it archives two more records and purges them
                for late in await log.read(ARCHIVED):
                    if late.seq <= ARCHIVED + 2:
                        archive.add(late)
                await archive.flush()
                await log.purge_to(ARCHIVED + 2)
        assert seen == list(range(1, RECORDS + 1))


@pytest.mark.usefixtures("hurried")
async def test_the_store_of_a_broker_that_is_down_is_opened(tmp_path: Path) -> None:
    await stopped_run(tmp_path)
    found = await numbers(history.read_history(config_of(tmp_path, free_url())))
    assert found == list(range(1, RECORDS + 1))


@pytest.mark.parametrize("flushed", [True, False], ids=["archived", "before the first archive"])
async def test_the_store_is_opened_where_another_runs_broker_has_the_address(
    tmp_path: Path, flushed: bool
) -> None:
    await stopped_run(tmp_path / "run")
    if not flushed:
        shutil.rmtree(tmp_path / "run/archive")
    async with bundled_server(tmp_path / "other") as server:
        found = await numbers(history.read_history(config_of(tmp_path / "run", server.url)))
    assert found == list(range(1, RECORDS + 1))


async def test_the_store_is_opened_where_another_run_of_its_name_has_the_address(
    tmp_path: Path,
) -> None:
    await stopped_run(tmp_path / "run")
    async with (
        bundled_server(tmp_path / "other") as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        await RunLog.create(connection, NAMES, max_bytes=64 << 20)
        found = await numbers(history.read_history(config_of(tmp_path / "run", server.url)))
    assert found == list(range(1, RECORDS + 1))


async def test_an_archive_without_its_broker_and_store_is_read_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await stopped_run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/broker")
    with caplog.at_level(logging.WARNING):
        async with bundled_server(tmp_path / "other") as server:
            found = await numbers(history.read_history(config_of(tmp_path / "run", server.url)))
    assert found == list(range(1, ARCHIVED + 1))
    assert (
        f"reading the archive alone: {tmp_path}/run: the broker at {server.url} has no run 't'"
        in caplog.text
    )


@pytest.mark.usefixtures("hurried")
async def test_a_store_that_a_server_has_open_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await stopped_run(tmp_path)
    with caplog.at_level(logging.WARNING):
        async with bundled_server(tmp_path / "broker"):
            found = await numbers(history.read_history(config_of(tmp_path, free_url())))
    assert found == list(range(1, ARCHIVED + 1))
    assert "reading the archive alone" in caplog.text


@pytest.mark.usefixtures("hurried")
async def test_a_broker_that_does_not_answer_is_not_taken_for_one_that_is_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await stopped_run(tmp_path)
    with caplog.at_level(logging.WARNING), socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        found = await numbers(history.read_history(config_of(tmp_path, url)))
    assert found == list(range(1, ARCHIVED + 1))
    assert "reading the archive alone" in caplog.text
