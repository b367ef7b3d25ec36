"""The archive: every record of the run log, kept in the run folder as compressed shards.

A shard holds contiguous records and appears whole, by rename. Together with the log it is the run's
complete history: what was purged from the broker is here.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from headrace.broker.runlog import Entry
from headrace.errors import LogError
from headrace.files import flush

_SHARD_BYTES = 32 << 20


class _Header(msgspec.Struct, frozen=True, array_like=True):
    identity: str
    first: int
    last: int


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    subject: str
    data: bytes


class Archive:
    """Collects records and writes them as shards `<first>-<last>.zst` in a folder."""

    def __init__(self, folder: Path, identity: str) -> None:
        """Open a run's archive.

        Raises:
            LogError: it belongs to another log, or a shard is missing in it.
        """
        self._folder = folder
        self._identity = identity
        folder.mkdir(parents=True, exist_ok=True)
        self._pending: list[_Stored] = []
        self._pending_bytes = 0
        self._writing = asyncio.Lock()
        self.last = 0
        """Sequence of the last record that is durable here."""
        for path in shards(folder):
            header = _read_header(path)
            if header.identity != identity:
                raise LogError(
                    f"{path} belongs to another run log ({header.identity[:8]}, not "
                    f"{identity[:8]}); use a new run.dir"
                )
            if header.first != self.last + 1:
                raise LogError(
                    f"{folder}: records {self.last + 1} to {header.first - 1} are missing"
                )
            self.last = header.last
        self._newest = self.last

    def add(self, entry: Entry) -> None:
        """Take the next record; one that is archived already is passed over."""
        if entry.seq <= self._newest:
            return
        if entry.seq != self._newest + 1:
            raise LogError(f"record {entry.seq} does not follow {self._newest} in {self._folder}")
        self._newest = entry.seq
        self._pending.append(_Stored(entry.seq, entry.subject, entry.data))
        self._pending_bytes += len(entry.data)

    @property
    def full(self) -> bool:
        """Whether enough records wait for a shard of their own."""
        return self._pending_bytes >= _SHARD_BYTES

    async def flush(self) -> None:
        """Make all records durable; those that are added meanwhile wait for the next flush."""
        async with self._writing:
            # cut here, in the thread that adds, so that no record can fall between two lists
            records, self._pending, self._pending_bytes = self._pending, [], 0
            if records:
                await asyncio.to_thread(self._write, records)
                self.last = records[-1].seq

    def _write(self, records: list[_Stored]) -> None:
        first, last = records[0].seq, records[-1].seq
        path = self._folder / f"{first:012d}-{last:012d}.zst"
        aside = path.with_suffix(".tmp")
        header = msgspec.msgpack.encode(_Header(self._identity, first, last))
        body = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(records))
        with aside.open("wb") as sink:
            sink.write(len(header).to_bytes(4, "little") + header + body)
            sink.flush()
            os.fsync(sink.fileno())
        aside.replace(path)
        flush(self._folder)


def shards(folder: Path) -> list[Path]:
    """Shards of an archive in log order."""
    return sorted(folder.glob("*.zst"))


def read(folder: Path) -> Iterator[Entry]:
    """All archived records in order.

    Raises:
        LogError: a shard is missing or corrupt.
    """
    expected = 1
    for path in shards(folder):
        header = _read_header(path)
        if header.first != expected:
            raise LogError(f"{folder}: records {expected} to {header.first - 1} are missing")
        raw = path.read_bytes()
        body = raw[4 + int.from_bytes(raw[:4], "little") :]
        try:
            data = zstandard.ZstdDecompressor().decompress(body)
            stored = msgspec.msgpack.decode(data, type=list[_Stored])
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise LogError(f"{path} is corrupt: {error}") from error
        for item in stored:
            yield Entry(item.seq, item.subject, item.data)
        expected = header.last + 1


def identity(folder: Path) -> str | None:
    """Identity of the log that is archived in a folder; None when there is nothing."""
    paths = shards(folder)
    return _read_header(paths[0]).identity if paths else None


def _read_header(path: Path) -> _Header:
    with path.open("rb") as source:
        length = int.from_bytes(source.read(4), "little")
        raw = source.read(min(length, 4096))
    try:
        return msgspec.msgpack.decode(raw, type=_Header)
    except msgspec.MsgspecError as error:
        raise LogError(f"{path} is not an archive shard: {error}") from error
