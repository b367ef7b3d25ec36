"""The stream of stored versions: manifests and chunks of anchors and deltas, and the head.

The learner stores a version, then publishes a head that names it; an actor that is behind reads the
head and pulls what it lacks. Versions below the newest anchor are purged; a reader in the middle of
one starts again from the newest head.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from headrace.broker.connection import Connection, Retry, is_wrong_sequence
from headrace.broker.records import decode, encode
from headrace.broker.subjects import RunNames
from headrace.broker.weights import (
    MAX_MANIFEST_BYTES,
    Head,
    Link,
    Manifest,
)
from headrace.errors import BrokerError, FencedError, WeightError

# With its headers a chunk stays below the default message limit of a broker, 1 MiB.
CHUNK_BYTES = 960 << 10
_IN_FLIGHT = 8
_READ_BYTES = 8 << 20
_READ_TIMEOUT_S = 10.0


class PurgedError(WeightError):
    """A stored version vanished while it was read; a newer one exists."""


class WeightChannel:
    """Access to one run's stored weights."""

    def __init__(self, connection: Connection, names: RunNames) -> None:
        self._connection = connection
        self._names = names

    async def create(self) -> None:
        """Create the stream; an existing one is kept."""
        config = api.StreamConfig(
            name=self._names.weights_stream,
            subjects=[self._names.weights("*", "*", "*")],
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            duplicate_window=600,
            allow_direct=True,
        )
        async for attempt in Retry(self._connection, "creating the weights stream"):
            with attempt:
                await self._connection.js.add_stream(config)

    @property
    def _head_subject(self) -> str:
        return self._names.weights("head", "current")

    def subject(self, kind: str, version: int, lineage: int, part: int | str = "manifest") -> str:
        """Subject of a part of one stored version."""
        return self._names.weights(kind, f"{version}-{lineage}", part)

    async def head(self) -> tuple[Head, int] | None:
        """Newest head and its sequence; None before the first version, or without a stream."""
        message = await self._last(self._head_subject)
        if message is None:
            return None
        seq = int((message.headers or {})["Nats-Sequence"])
        return decode(message.data, Head, where=f"{self._head_subject} {seq}"), seq

    async def manifest(self, subject: str) -> Manifest:
        """Manifest at its subject.

        Raises:
            PurgedError: it is gone.
            RecordError: it is not a valid manifest.
        """
        message = await self._last(subject)
        if message is None:
            raise PurgedError(f"no manifest at {subject}")
        return decode(message.data, Manifest, where=subject, limit=MAX_MANIFEST_BYTES)

    async def put_manifest(self, manifest: Manifest) -> int:
        """Store the manifest; returns its sequence."""
        return await self._put(
            self.subject(manifest.kind, manifest.version, manifest.lineage),
            encode(manifest, limit=MAX_MANIFEST_BYTES),
        )

    async def put_chunks(self, manifest: Manifest, chunks: Sequence[memoryview]) -> None:
        """Store the chunks of a version, several in flight."""
        slots = asyncio.Semaphore(_IN_FLIGHT)

        async def put(part: int, chunk: memoryview) -> None:
            async with slots:
                subject = self.subject(manifest.kind, manifest.version, manifest.lineage, part)
                await self._put(subject, bytes(chunk))

        try:
            async with asyncio.TaskGroup() as tasks:
                for part, chunk in enumerate(chunks):
                    tasks.create_task(put(part, chunk))
        except* BrokerError as errors:
            raise errors.exceptions[0] from errors

    async def put_head(self, head: Head, after_seq: int) -> int:
        """Make a stored version visible, if `after_seq` is still the newest head; its sequence.

        Raises:
            FencedError: another learner published a head in between.
        """
        data = encode(head)
        async for attempt in Retry(self._connection, "publishing the weights head"):
            with attempt:
                try:
                    ack = await self._connection.js.publish(
                        self._head_subject,
                        data,
                        headers={"Nats-Expected-Last-Subject-Sequence": str(after_seq)},
                    )
                except nats.js.errors.APIError as error:
                    if not is_wrong_sequence(error):
                        raise
                    # The answer to an earlier attempt may have been lost.
                    found = await self.head()
                    if found is None:
                        raise nats.errors.NoRespondersError from error
                    if found[0] == head:
                        return found[1]
                    raise FencedError(
                        f"weights {head.version} (lineage {head.lineage}) were not published: "
                        "another learner publishes for this run"
                    ) from error
                return ack.seq
        raise AssertionError("unreachable")

    async def purge_below(self, seq: int) -> None:
        """Remove everything below a sequence that is stored."""
        if seq > 1:  # the server takes 0 for "everything"
            async for attempt in Retry(self._connection, "purging old weights"):
                with attempt:
                    await self._connection.js.purge_stream(self._names.weights_stream, seq=seq)

    async def chunks(self, link: Link, manifest: Manifest) -> AsyncIterator[tuple[int, bytes]]:
        """All chunks of a stored version as (part, bytes), in any order.

        Raises:
            PurgedError: some are gone.
        """
        pattern = self.subject(link.kind, link.version, link.lineage, "*")
        missing, seq = manifest.chunk_count, link.first_seq
        messages: list[Msg] = []
        while missing:
            async for attempt in Retry(self._connection, f"pulling weights {link.version}"):
                with attempt:
                    messages = await self._direct(
                        {
                            "seq": seq,
                            "next_by_subj": pattern,
                            "batch": 1000,
                            "max_bytes": _READ_BYTES,
                        }
                    )
            if not messages:
                raise PurgedError(
                    f"weights {link.version} (lineage {link.lineage}): {missing} of "
                    f"{manifest.chunk_count} chunks are gone"
                )
            for message in messages:
                headers = message.headers or {}
                seq = int(headers["Nats-Sequence"]) + 1
                part = headers["Nats-Subject"].rpartition(".")[2]
                if part.isdecimal():
                    missing -= 1
                    yield int(part), message.data

    async def _put(self, subject: str, data: bytes) -> int:
        async for attempt in Retry(self._connection, f"storing {subject}"):
            with attempt:
                ack = await self._connection.js.publish(
                    subject, data, headers={"Nats-Msg-Id": subject}
                )
                return ack.seq
        raise AssertionError("unreachable")

    async def _last(self, subject: str) -> Msg | None:
        async for attempt in Retry(self._connection, f"reading {subject}"):
            with attempt:
                messages = await self._direct({"last_by_subj": subject})
                return messages[0] if messages else None
        raise AssertionError("unreachable")

    async def _direct(self, request: dict[str, object]) -> list[Msg]:
        nc = self._connection.nc
        inbox = nc.new_inbox()
        subscription = await nc.subscribe(inbox, pending_bytes_limit=64 << 20)
        try:
            await nc.publish(
                f"$JS.API.DIRECT.GET.{self._names.weights_stream}",
                json.dumps(request).encode(),
                reply=inbox,
            )
            messages: list[Msg] = []
            while True:
                message = await subscription.next_msg(timeout=_READ_TIMEOUT_S)
                status = (message.headers or {}).get("Status")
                # 204 ends a batch, 404: no such message, 503: no such stream (yet).
                if status in {"204", "404", "503"}:
                    return messages
                messages.append(message)
                if "batch" not in request:
                    return messages
        finally:
            await subscription.unsubscribe()
