"""Connection to the broker: one place for its settings, deadlines and errors."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext

from headrace.errors import BrokerError

logger = logging.getLogger(__name__)

# the server's error codes (server/errors.json of nats-server)
NO_RESOURCES = 10023
NO_MEMORY = 10028
NO_STORAGE = 10047
STREAM_EXISTS = 10058
"""A stream of this name exists with another configuration."""
WRONG_LAST_SEQUENCE = 10071
NO_SPACE = 10077
"""The stream cannot store the message: it, or the disk below it, is full, or it is closing."""

# what a broker that restarts, elects a leader or reconnects answers; the same request may succeed
RETRYABLE = (
    TimeoutError,  # of the client, and of a caller's own limit
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionReconnectingError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
)

_CLOSE_S = 5.0


@dataclass(frozen=True)
class Connection:
    """A live connection; it reconnects by itself for as long as it is open."""

    nc: Client
    js: JetStreamContext
    url: str
    """Address without credentials, as it may be shown."""
    patience_s: float
    """How long one operation keeps trying across a loss of the broker, in seconds."""

    async def close(self) -> None:
        """Close the connection; unanswered requests fail."""
        # uvloop refuses a last write to a transport whose server has gone; a server that hangs lets
        # it wait for ever
        with contextlib.suppress(RuntimeError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.nc.close()


def without_credentials(url: str) -> str:
    """An address as it may be shown: `nats://user:password@host:port` without user and password.

    >>> without_credentials("nats://me:secret@10.0.0.1:4222")
    'nats://10.0.0.1:4222'
    """
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2] if separator else url.rpartition("@")[2]


async def connect(url: str, *, name: str, deadline_s: float = 60.0) -> Connection:
    """Connect, waiting for the broker to appear until the deadline.

    Raises:
        BrokerError: nothing answers at `url` before the deadline, or it refuses the credentials.
    """
    shown = without_credentials(url)
    client = Client()
    errors: list[Exception] = []
    refused = asyncio.Event()

    async def on_error(error: Exception) -> None:
        errors.append(error)
        if "authorization" in str(error).lower():
            refused.set()
        if client.is_connected:
            logger.warning("broker %s: %s", shown, error)

    async def on_disconnect() -> None:
        if not client.is_closed:
            logger.warning("lost the broker at %s; reconnecting", shown)

    async def on_reconnect() -> None:
        logger.info("reconnected to the broker at %s", shown)

    connecting = asyncio.ensure_future(
        client.connect(
            url,
            name=name,
            error_cb=on_error,
            disconnected_cb=on_disconnect,
            reconnected_cb=on_reconnect,
            connect_timeout=2,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]  # seconds, fractions work
            ping_interval=5,
            max_outstanding_pings=2,
            pending_size=32 << 20,
        )
    )
    refusing = asyncio.ensure_future(refused.wait())
    try:
        await asyncio.wait({connecting, refusing}, timeout=1, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done() and not refused.is_set():
            logger.info("waiting for the broker at %s", shown)
            await asyncio.wait(
                {connecting, refusing},
                timeout=max(0.0, deadline_s - 1),
                return_when=asyncio.FIRST_COMPLETED,
            )
        if connecting.done() and not refused.is_set():
            await connecting
            return Connection(client, client.jetstream(timeout=5), shown, deadline_s)
    except (OSError, nats.errors.Error) as error:
        errors.append(error)
    finally:
        refusing.cancel()
        if not connecting.done():
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
    await client.close()
    cause = errors[-1] if errors else "no answer"
    if refused.is_set():
        raise BrokerError(f"the broker at {shown} refuses the credentials: {cause}")
    raise BrokerError(
        f"no broker answers at {shown} after {deadline_s:.0f} s ({cause}); start one with "
        "`headrace broker`, or correct broker.url"
    )


@asynccontextmanager
async def connected(url: str, *, name: str, deadline_s: float) -> AsyncIterator[Connection]:
    """`connect` for the length of a block."""
    connection = await connect(url, name=name, deadline_s=deadline_s)
    try:
        yield connection
    finally:
        await connection.close()


class Retry:
    """Repeats a broker request across a loss of the broker, until the connection's patience ends.

    >>> async for attempt in Retry(connection, "reading the log"):  # doctest: +SKIP
    ...     with attempt:
    ...         return await request()

    Raises:
        BrokerError: no answer until the end of the patience, or the broker has no room.
    """

    def __init__(self, connection: Connection, what: str) -> None:
        self._connection = connection
        self._what = what
        self._deadline = time.monotonic() + connection.patience_s
        self._wait = 0.05
        self._tried = False
        self._failure: Exception | None = None

    def __aiter__(self) -> "Retry":
        return self

    async def __anext__(self) -> "Retry":
        if self._failure is not None:
            if time.monotonic() >= self._deadline or self._connection.nc.is_closed:
                raise BrokerError(
                    f"the broker at {self._connection.url} did not answer while {self._what} "
                    f"for {self._connection.patience_s:.0f} s: {self._failure!r}"
                ) from self._failure
            await asyncio.sleep(self._wait)
            self._wait = min(self._wait * 2, 1.0)
            self._failure = None
        elif self._tried:
            raise StopAsyncIteration
        self._tried = True
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, nats.js.errors.APIError) and has_no_room(error):
            raise BrokerError(
                f"the broker at {self._connection.url} has no room left while {self._what} "
                f"({error.description}); free space on the disk that holds its data and start "
                "again, nothing is lost"
            ) from error
        if isinstance(error, RETRYABLE):
            self._failure = error
            return True
        return False


def has_no_room(error: nats.js.errors.APIError) -> bool:
    """Whether a stream or the broker's disk is full: no repetition helps."""
    # the broker says the same of a stream that it closes at its end
    closing = "closed" in (error.description or "")
    return error.err_code in {NO_RESOURCES, NO_SPACE, NO_STORAGE} and not closing


def is_wrong_sequence(error: nats.js.errors.APIError) -> bool:
    """Whether a fenced publish was refused because another record came first."""
    return error.err_code == WRONG_LAST_SEQUENCE
