"""A run's whole log, from the archive in its folder and what the broker still holds behind it."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

from headrace.broker.connection import Connection, connected
from headrace.broker.runlog import Entry, RunLog
from headrace.broker.server import bundled_server, is_loopback, is_open, is_refused
from headrace.broker.subjects import RunNames
from headrace.config import Config
from headrace.errors import BrokerError, ConfigError, DeadlineError, LogError
from headrace.learner import archive

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0


async def read_history(config: Config) -> AsyncIterator[Entry]:
    """All records of a run in order.

    Where the run's own broker is not running, its store is opened for the time of the reading, also
    when another broker has its address by now.

    Raises:
        LogError: a record is missing.
        BrokerError: there is no archive, and no broker answers.
        ConfigError: there is no such run.
    """
    run_dir = Path(config.run.dir)
    position = 0
    for entry in archive.read(run_dir / "archive"):
        yield entry
        position = entry.seq
    async with AsyncExitStack() as stack:
        try:
            log = await _attach(stack, config)
        except (BrokerError, ConfigError) as error:
            if not position:
                raise
            logger.warning("reading the archive alone: %s", error)
            return
        async for entry in _behind(log, run_dir / "archive", position):
            yield entry


async def _attach(stack: AsyncExitStack, config: Config) -> RunLog:
    """The run's log: on the broker that answers, else in the run's own store, opened for `stack`.

    Raises:
        BrokerError: no broker answers, and the store is not there or not to be opened.
        ConfigError: neither the broker nor the store holds this run.
    """
    url, store = config.broker.url, Path(config.run.dir) / "broker"
    try:
        connection = await stack.enter_async_context(
            connected(url, name="history", deadline_s=_ANSWER_S)
        )
        return await _log_of(connection, config)
    except BrokerError:
        # a broker that does not answer may still be the run's own
        if not (_is_closed(store, url) and is_refused(url)):
            raise
    except ConfigError:
        # another run's broker has the address
        if not _is_closed(store, url):
            raise
    server = await stack.enter_async_context(bundled_server(store))
    connection = await stack.enter_async_context(
        connected(server.url, name="history", deadline_s=10)
    )
    return await _log_of(connection, config)


async def _log_of(connection: Connection, config: Config) -> RunLog:
    """The run's log on a broker.

    Raises:
        ConfigError: the broker does not hold it.
    """
    run_dir = Path(config.run.dir)
    try:
        log = await RunLog.attach(connection, RunNames(config.run_name))
    except DeadlineError as error:
        raise ConfigError(
            f"{run_dir}: the broker at {connection.url} has no run {config.run_name!r}; correct "
            "broker.url or run.name"
        ) from error
    identity = archive.identity(run_dir / "archive")
    if identity is not None and log.identity != identity:
        raise ConfigError(
            f"{run_dir}: the broker at {connection.url} holds another run of the name "
            f"{config.run_name!r}; correct broker.url"
        )
    return log


async def _behind(log: RunLog, folder: Path, position: int) -> AsyncIterator[Entry]:
    """Records of the log behind a position; what a running learner purges, from its archive."""
    while True:
        try:
            await log.check_position(position)
            entries = await log.read(position)
        except LogError:
            entries = [entry for entry in archive.read(folder) if entry.seq > position]
            if not entries:
                raise
        if not entries:
            return
        for entry in entries:
            yield entry
        position = entries[-1].seq


def _is_closed(store: Path, url: str) -> bool:
    """Whether the run's own broker is down: its store lies here and no server has it open."""
    return is_loopback(url) and (store / "data").exists() and not is_open(store)
