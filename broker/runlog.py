"""The run log: one ordered, durable stream of records, and the only truth about a run.

Reading is stateless: batches fetched by sequence, contiguity asserted. A reader that attaches or
reconnects checks that the stream is the one it knows and still holds what comes next.
"""

import asyncio
import hashlib
import json
import time
import uuid
from dataclasses import dataclass

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from headrace.broker.connection import (
    NO_MEMORY,
    NO_SPACE,
    NO_STORAGE,
    STREAM_EXISTS,
    Connection,
    Retry,
    is_wrong_sequence,
)
from headrace.broker.records import (
    MAX_RECORD_BYTES,
    Failed,
    Issued,
    RunConfig,
    Skip,
    Step,
    Trajectory,
    encode,
)
from headrace.broker.subjects import RunNames
from headrace.errors import BrokerError, DeadlineError, FencedError, LogError

_READ_BYTES = 8 << 20
_READ_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Entry:
    """One record as it lies in the log."""

    seq: int
    subject: str
    data: bytes


class Info(msgspec.Struct, frozen=True):
    """State of the stream."""

    identity: str
    first_seq: int
    last_seq: int
    bytes: int
    max_bytes: int


class RunLog:
    """Access to one run's log. `create` makes the stream, `attach` finds it."""

    def __init__(self, connection: Connection, names: RunNames, identity: str) -> None:
        self._connection = connection
        self._names = names
        self.identity = identity
        """Identity of the stream; sequence numbers mean nothing in a stream of another one."""

    @classmethod
    async def create(cls, connection: Connection, names: RunNames, *, max_bytes: int) -> "RunLog":
        """Create the log's stream, or find the one that exists.

        Raises:
            BrokerError: the broker cannot hold a stream of `max_bytes`.
        """
        config = api.StreamConfig(
            name=names.log_stream,
            subjects=[f"{names.prefix}.log.>"],
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_bytes=max_bytes,
            max_msg_size=MAX_RECORD_BYTES + 4096,
            duplicate_window=3600,
            deny_delete=True,
            allow_direct=True,
            metadata={"identity": uuid.uuid4().hex},
        )
        async for attempt in Retry(connection, "creating the run log"):
            with attempt:
                try:
                    await connection.js.add_stream(config)
                except nats.js.errors.BadRequestError as error:
                    if error.err_code != STREAM_EXISTS:  # with another identity
                        raise BrokerError(f"the run log cannot be created: {error}") from error
                except nats.js.errors.APIError as error:
                    if error.err_code in {NO_STORAGE, NO_MEMORY}:
                        raise BrokerError(
                            f"the broker has no room for a run log of {max_bytes} bytes "
                            f"({error.description}); free disk or lower broker.log_bytes"
                        ) from error
                    raise
                # what did not decode is kept for whoever wants to know why
                await connection.js.add_stream(
                    api.StreamConfig(
                        name=names.dead_stream,
                        subjects=[names.dead_letter("*", "*")],
                        storage=api.StorageType.FILE,
                        max_bytes=64 << 20,
                        discard=api.DiscardPolicy.OLD,
                    )
                )
                return await cls.attach(connection, names)
        raise AssertionError("unreachable")

    @classmethod
    async def attach(
        cls, connection: Connection, names: RunNames, *, deadline_s: float = 0.0
    ) -> "RunLog":
        """Find an existing log, waiting for its learner to create it until the deadline.

        Raises:
            DeadlineError: there is no such run on this broker.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            log = cls(connection, names, "")
            try:
                log.identity = (await log.info()).identity
            except nats.js.errors.NotFoundError as error:
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"the broker at {connection.url} has no run {names.run!r}: waited "
                        f"{deadline_s:.0f} s for its learner; start `headrace learner` with the "
                        "same run, or correct run.name"
                    ) from error
                await asyncio.sleep(0.2)
                continue
            return log

    async def info(self) -> Info:
        """State of the stream.

        Raises:
            LogError: it is not the stream that was attached.
        """
        async for attempt in Retry(self._connection, "asking for the run log's state"):
            with attempt:
                info = await self._connection.js.stream_info(self._names.log_stream)
                identity = (info.config.metadata or {}).get("identity", "")
                if self.identity and identity != self.identity:
                    raise LogError(
                        f"run log {self._names.run!r} was replaced (identity {identity[:8]}, "
                        f"expected {self.identity[:8]}); fork a new run from the checkpoint"
                    )
                state = info.state
                return Info(
                    identity,
                    state.first_seq,
                    state.last_seq,
                    state.bytes,
                    info.config.max_bytes or 0,
                )
        raise AssertionError("unreachable")

    async def check_position(self, position: int) -> Info:
        """Check that a reader at `position` can go on.

        Raises:
            LogError: the stream is behind the position, purged beyond it, or another stream.
        """
        info = await self.info()
        if info.last_seq < position:
            raise LogError(
                f"the run log ends at {info.last_seq}, but the checkpoint was taken at {position}: "
                "the broker lost records; fork a new run from the checkpoint"
            )
        if info.first_seq > position + 1:
            raise LogError(
                f"the run log begins at {info.first_seq}, but the checkpoint continues at "
                f"{position + 1}: it was purged beyond it; fork a new run from the checkpoint"
            )
        return info

    async def read(self, after: int) -> list[Entry]:
        """Next records behind sequence `after`, at most about 8 MB; empty at the end.

        Raises:
            LogError: a record is missing.
        """
        async for attempt in Retry(self._connection, "reading the run log"):
            with attempt:
                entries = await self._direct_batch(after + 1)
                if _first_missing(entries, after) is not None:
                    # a reconnection in the middle of an answer loses parts of it, not of the log
                    entries = await self._direct_batch(after + 1)
                missing = _first_missing(entries, after)
                if missing is not None:
                    await self.check_position(after)
                    raise LogError(
                        f"record {missing} is missing from the run log: the broker lost it; fork a "
                        "new run from the newest checkpoint (model.path=CHECKPOINT and another "
                        "run.dir)"
                    )
                return entries
        raise AssertionError("unreachable")

    async def _direct_batch(self, start: int) -> list[Entry]:
        request = {"seq": start, "batch": 1000, "max_bytes": _READ_BYTES}
        messages = await self._direct(json.dumps(request).encode())
        return [
            Entry(int(m.headers["Nats-Sequence"]), m.headers["Nats-Subject"], m.data)
            for m in messages
            if m.headers
        ]

    async def _direct(self, request: bytes) -> list[Msg]:
        nc = self._connection.nc
        inbox = nc.new_inbox()
        subscription = await nc.subscribe(inbox, pending_bytes_limit=64 << 20)
        try:
            await nc.publish(f"$JS.API.DIRECT.GET.{self._names.log_stream}", request, reply=inbox)
            messages: list[Msg] = []
            while True:
                message = await subscription.next_msg(timeout=_READ_TIMEOUT_S)
                status = (message.headers or {}).get("Status")
                if status in {"204", "404"}:
                    return messages
                if status is not None:
                    raise nats.js.errors.ServiceUnavailableError
                messages.append(message)
        finally:
            await subscription.unsubscribe()

    async def last(self, subject: str) -> Entry | None:
        """Last record of one subject, read from the stream's leader."""
        async for attempt in Retry(self._connection, f"reading the last record of {subject}"):
            with attempt:
                try:
                    message = await self._connection.js.get_last_msg(
                        self._names.log_stream, subject
                    )
                except nats.js.errors.NotFoundError:
                    return None
                return Entry(message.seq or 0, subject, message.data or b"")
        raise AssertionError("unreachable")

    async def append(
        self, record: RunConfig | Issued | Step | Skip, *, after: int, message_id: str
    ) -> int:
        """Append a record that is not a sample, fenced by the last record of its subject.

        Args:
            record: what to append.
            after: sequence of the last record of the same subject that the writer knows; 0 if none.
            message_id: unique for this record and writer; tells an own record from another's.

        Returns:
            The sequence of the record, durable.

        Raises:
            FencedError: another writer appended first.
            BrokerError: the log is full, or the broker does not answer.
        """
        subject = {
            RunConfig: self._names.config,
            Issued: self._names.issued,
            Step: self._names.step,
            Skip: self._names.skip,
        }[type(record)]
        data = encode(record)
        headers = {
            "Nats-Msg-Id": message_id,
            "Nats-Expected-Last-Subject-Sequence": str(after),
        }
        async for attempt in Retry(self._connection, f"appending to {subject}"):
            with attempt:
                try:
                    ack = await self._connection.js.publish(
                        subject, data, timeout=10, headers=dict(headers)
                    )
                except nats.js.errors.APIError as error:
                    if is_wrong_sequence(error):
                        last = await self.last(subject)
                        # a retry of a stored record is refused before it is recognised
                        if last is not None and last.data == data and last.seq > after:
                            return last.seq
                        # to the broker a subject whose records were purged never had one
                        if last is None and 0 < after < (await self.info()).first_seq:
                            return await self.append(record, after=0, message_id=message_id)
                    self._raise(error, subject)
                    raise
                return ack.seq
        raise AssertionError("unreachable")

    async def decide(self, record: Trajectory | Failed, *, limit: int, domain: str) -> bool:
        """Publish the record that decides a slot, unless the slot is decided already.

        Args:
            record: trajectory or failure.
            limit: largest size in bytes; the issue window reserved this much.
            domain: for the headers that dashboards read.

        Returns:
            Whether this record is the one that decided the slot.

        Raises:
            BrokerError: the log is full, or the broker does not answer.
        """
        subject = self._names.sample(record.group, record.index)
        data = encode(record, limit=limit)
        digest = hashlib.sha256(data).hexdigest()
        headers = _headers(record, domain) | {
            "Nats-Msg-Id": f"{record.group}.{record.index}.{digest[:16]}",
            "Nats-Expected-Last-Subject-Sequence": "0",
            "Headrace-Sha256": digest,
        }
        async for attempt in Retry(self._connection, f"publishing sample {subject}"):
            with attempt:
                try:
                    await self._connection.js.publish(
                        subject, data, timeout=10, headers=dict(headers)
                    )
                except nats.js.errors.APIError as error:
                    if is_wrong_sequence(error):
                        last = await self.last(subject)
                        return last is not None and last.data == data
                    self._raise(error, subject)
                    raise
                return True
        raise AssertionError("unreachable")

    async def decided(self, group: int) -> set[int]:
        """Indices of the group's slots that are decided."""
        pattern = self._names.sample(group, "*")
        async for attempt in Retry(self._connection, f"asking which samples of {group} exist"):
            with attempt:
                info = await self._connection.js.stream_info(
                    self._names.log_stream, subjects_filter=pattern
                )
                return {int(s.rpartition(".")[2]) for s in (info.state.subjects or {})}
        raise AssertionError("unreachable")

    async def keep_dead(self, group: int, index: int, entry: Entry, reason: str) -> None:
        """Keep the bytes of a record that does not decode or verify; once per record."""
        headers = {
            "Nats-Msg-Id": f"dead-{entry.seq}",
            "Headrace-Sequence": str(entry.seq),
            "Headrace-Reason": " ".join(reason.split())[:500],
        }
        async for attempt in Retry(self._connection, "keeping a record that does not decode"):
            with attempt:
                await self._connection.js.publish(
                    self._names.dead_letter(group, index), entry.data, headers=dict(headers)
                )

    async def purge_to(self, position: int) -> None:
        """Delete all records up to and including `position`.

        Raises:
            LogError: the position lies beyond the end of the log.
        """
        info = await self.info()
        # purging at 0 or beyond the end would delete everything
        if not 0 <= position <= info.last_seq:
            raise LogError(f"cannot purge to {position}: the log ends at {info.last_seq}")
        if position >= info.first_seq:
            async for attempt in Retry(self._connection, "purging the run log"):
                with attempt:
                    await self._connection.js.purge_stream(self._names.log_stream, seq=position + 1)

    def _raise(self, error: nats.js.errors.APIError, subject: str) -> None:
        if is_wrong_sequence(error):
            raise FencedError(
                f"another learner of run {self._names.run!r} writes {subject}; this one stops"
            ) from error
        if error.err_code == NO_SPACE and "maximum" in (error.description or ""):
            raise BrokerError(
                f"the run log of {self._names.run!r} is full ({error.description}); raise "
                "broker.log_bytes"
            ) from error


def _first_missing(entries: list[Entry], after: int) -> int | None:
    for expected, entry in enumerate(entries, after + 1):
        if entry.seq != expected:
            return expected
    return None


def _headers(record: Trajectory | Failed, domain: str) -> dict[str, str]:
    headers = {"Headrace-Domain": domain, "Headrace-Actor": record.actor}
    if isinstance(record, Failed):
        return headers | {"Headrace-Side": record.side, "Headrace-Kind": record.kind}
    versions = sorted({span.value for span in record.versions})
    return headers | {
        "Headrace-Score": f"{record.verdict.score:.6g}",
        "Headrace-Success": str(int(record.verdict.success)),
        "Headrace-Side": record.verdict.side,
        "Headrace-Tokens": str(len(record.tokens)),
        "Headrace-Sampled": str(len(record.logprobs)),
        "Headrace-Versions": ",".join(map(str, versions)),
    }
