"""A run's whole log, from the archive in its folder and what the broker still holds behind it."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

from headrace.broker.connection import connected, without_credentials
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

    Where the run's own broker is not running, its store is opened for the time of the reading.

    Raises:
        LogError: a record is missing.
        ConfigError: there is no such run.
    """
    run_dir, names = Path(config.run.dir), RunNames(config.run_name)
    position = 0
    for entry in archive.read(run_dir / "archive"):
        yield entry
        position = entry.seq
    identity = archive.identity(run_dir / "archive")
    store = run_dir / "broker"
    async with AsyncExitStack() as stack:
        url = config.broker.url
        try:
            connection = await stack.enter_async_context(
                connected(url, name="history", deadline_s=_ANSWER_S)
            )
        except BrokerError:
            if not _may_open(store, url):
                if position:
                    shown = without_credentials(url)
                    logger.warning("no broker answers at %s: reading the archive alone", shown)
                    return
                raise
            server = await stack.enter_async_context(bundled_server(store))
            connection = await stack.enter_async_context(
                connected(server.url, name="history", deadline_s=10)
            )
        try:
            log = await RunLog.attach(connection, names)
        except DeadlineError as error:
            if position:
                return
            raise ConfigError(f"{run_dir}: {error}") from error
        if identity is not None and log.identity != identity:
            logger.warning("the broker holds another run of this name: reading the archive alone")
            return
        async for entry in _behind(log, run_dir / "archive", position):
            yield entry


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


def _may_open(store: Path, url: str) -> bool:
    """Whether the run's own broker is down: its store lies here and no server has it open."""
    return is_loopback(url) and (store / "data").exists() and is_refused(url) and not is_open(store)
