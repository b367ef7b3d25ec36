"""Leases: who is alive. A process renews its lease; the broker removes it when it stops.

Leases live in a plain stream with message TTLs. In a key-value bucket an update would drop the TTL,
and any writer of one key could wipe the others.
"""

import json
import logging

import nats.js.errors
from msgspec import field
from nats.js import api

from headrace.broker.connection import Connection, Retry
from headrace.broker.records import Record, decode, encode
from headrace.broker.subjects import RunNames
from headrace.errors import RecordError

logger = logging.getLogger(__name__)

TTL_S = 6
RENEW_S = 2.0


class Lease(Record, frozen=True, kw_only=True, tag="lease"):
    """What a process says about itself."""

    role: str
    id: str
    pid: int
    host: str
    started: float
    """Unix seconds."""
    status: str
    """A word of what it does: `starting`, `waiting`, `sampling`, `training`, ..."""
    detail: str = ""
    """Whom or what it waits for, or why it is unhealthy."""
    version: int = -1
    """Policy version that it serves or has published."""
    lineage: int = -1
    pools: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """Groups whose tasks it holds."""
    counters: dict[str, float] = field(default_factory=dict)
    """Totals since it started, e.g. `sampled_tokens`, `samples`."""


async def create(connection: Connection, names: RunNames) -> None:
    """Create the lease stream; an existing one is kept."""
    async for attempt in Retry(connection, "creating the lease stream"):
        with attempt:
            await connection.js.add_stream(_stream(names))


def _stream(names: RunNames) -> api.StreamConfig:
    return api.StreamConfig(
        name=names.lease_stream,
        subjects=[names.lease("*", "*")],
        max_msgs_per_subject=1,
        storage=api.StorageType.MEMORY,
        allow_direct=True,
        allow_msg_ttl=True,
    )


async def renew(connection: Connection, names: RunNames, lease: Lease) -> None:
    """Publish the lease for another `TTL_S` seconds."""
    subject, data = names.lease(lease.role, lease.id), encode(lease)
    try:
        await connection.js.publish(subject, data, timeout=2, msg_ttl=TTL_S)
    except nats.js.errors.NoStreamResponseError:
        # a broker that restarts forgets the stream, which lies in memory
        await connection.js.add_stream(_stream(names))
        await connection.js.publish(subject, data, timeout=2, msg_ttl=TTL_S)


async def release(connection: Connection, names: RunNames, role: str, ident: str) -> None:
    """Remove a lease at once, at an orderly end."""
    await connection.js.purge_stream(names.lease_stream, subject=names.lease(role, ident))


async def alive(connection: Connection, names: RunNames) -> list[Lease]:
    """All leases that have not expired and can be read, ordered by role and id."""
    nc = connection.nc
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox)
    leases = []
    try:
        request = {"multi_last": [names.lease("*", "*")], "batch": 1000}
        await nc.publish(
            f"$JS.API.DIRECT.GET.{names.lease_stream}", json.dumps(request).encode(), reply=inbox
        )
        while True:
            message = await subscription.next_msg(timeout=2)
            if "Status" in (message.headers or {}):
                break
            try:
                leases.append(decode(message.data, Lease, where=message.subject))
            except RecordError as error:
                # a process of another headrace version; it must not take this one down
                logger.debug("lease passed over: %s", error)
    finally:
        await subscription.unsubscribe()
    return sorted(leases, key=lambda lease: (lease.role, lease.id))
