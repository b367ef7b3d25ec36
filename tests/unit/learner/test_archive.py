"""The archive keeps every record once, in order, across restarts."""

import asyncio
import threading
from pathlib import Path

import pytest

from headrace.broker.runlog import Entry
from headrace.errors import LogError
from headrace.learner.archive import Archive, identity, read, shards


def entry(seq: int) -> Entry:
    return Entry(seq, f"s.{seq}", bytes([seq]) * seq)


async def test_records_come_back_in_order_across_restarts(tmp_path: Path) -> None:
    first = Archive(tmp_path, "id")
    for seq in range(1, 6):
        first.add(entry(seq))
    await first.flush()
    first.add(entry(6))  # never flushed: the process dies here
    second = Archive(tmp_path, "id")
    assert second.last == 5
    for seq in range(3, 9):  # a restarted learner reads again from its checkpoint
        second.add(entry(seq))
    await second.flush()
    assert list(read(tmp_path)) == [entry(seq) for seq in range(1, 9)]
    assert identity(tmp_path) == "id"


def test_a_record_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "id")
    archive.add(entry(1))
    with pytest.raises(LogError, match="record 3 does not follow 1"):
        archive.add(entry(3))


async def test_the_archive_of_another_log_is_refused(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "one")
    archive.add(entry(1))
    await archive.flush()
    with pytest.raises(LogError, match=r"belongs to another run log.*new run\.dir"):
        Archive(tmp_path, "two")


async def test_a_missing_or_corrupt_shard_is_named(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "id")
    for seq in range(1, 4):
        archive.add(entry(seq))
        await archive.flush()
    paths = shards(tmp_path)
    paths[1].rename(tmp_path / "elsewhere")
    with pytest.raises(LogError, match="records 2 to 2 are missing"):
        list(read(tmp_path))
    (tmp_path / "elsewhere").rename(paths[1])
    paths[2].write_bytes(paths[2].read_bytes()[:-3])
    with pytest.raises(LogError, match="corrupt"):
        list(read(tmp_path))


def test_an_unfinished_shard_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "000000000001-000000000002.tmp").write_bytes(b"half")
    assert Archive(tmp_path, "id").last == 0
    assert list(read(tmp_path)) == []


async def test_a_record_that_arrives_while_others_are_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive(tmp_path, "id")
    writing, go_on = threading.Event(), threading.Event()
    write = archive._write

    def write_slowly(records) -> None:
        writing.set()
        assert go_on.wait(10)
        write(records)

    monkeypatch.setattr(archive, "_write", write_slowly)
    archive.add(entry(1))
    archive.add(entry(2))
    flushing = asyncio.ensure_future(archive.flush())
    assert await asyncio.to_thread(writing.wait, 10)
    archive.add(entry(3))
    go_on.set()
    await flushing
    assert archive.last == 2, "the third is not durable yet"
    await archive.flush()
    assert list(read(tmp_path)) == [entry(1), entry(2), entry(3)]
