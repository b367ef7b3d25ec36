"""Where and how the processes of a run on one machine are started."""

import logging
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.broker.connection import without_credentials
from headrace.broker.server import is_loopback, parse_url
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.monitor.processes import Place

logger = logging.getLogger(__name__)

GPU_DRIVER = Path("/dev/nvidiactl")
"""There where a GPU can be used; importing torch to ask it takes seconds."""


@dataclass(frozen=True)
class Places:
    """A place for each process that computes."""

    learner: Place
    actors: list[Place]


def place(config: Config) -> Places:
    """Place learner and actors on this machine's cores; on a GPU machine anywhere."""
    count = config.actors.count
    if GPU_DRIVER.exists():
        return Places(Place(), [Place()] * count)
    return plan_cores(
        sorted(os.sched_getaffinity(0)),
        learner_threads=config.learner.threads,
        actor_threads=config.actors.threads,
        actors=count,
        in_turns=config.staleness.max_versions == 0,
    )


def plan_cores(
    cores: list[int],
    *,
    learner_threads: int,
    actor_threads: int,
    actors: int,
    in_turns: bool = False,
) -> Places:
    """Give learner and actors disjoint cores where their threads would fill the machine.

    Two processes that share cores spin on each other's barriers: a training step took 3 to 5 times
    as long as with one pinned thread each. With a core to spare, or with a single one, the kernel
    places them. A synchronous run's learner and actors compute `in_turns` and share all cores.
    """
    own: list[int] = []
    shares: list[list[int]] = [[]] * actors
    if len(cores) > 1 and learner_threads + actors * actor_threads >= len(cores):
        split = 0 if in_turns else min(learner_threads, len(cores) - 1)
        own, rest = cores[:split], cores[split:]
        shares = [
            [rest[(number * actor_threads + i) % len(rest)] for i in range(actor_threads)]
            for number in range(actors)
        ]
    return Places(
        Place(frozenset(own), learner_threads),
        [Place(frozenset(share), actor_threads) for share in shares],
    )


def headrace_command(*arguments: str) -> list[str]:
    """Command line of a public headrace command in this environment."""
    return [sys.executable, "-P", "-m", "headrace.cli.main", *arguments]


def starts_broker(url: str) -> bool:
    """Whether a bundled broker is to be started: loopback, and no broker answers there yet.

    Raises:
        ConfigError: something else than a broker holds the port, or it is no broker's address.
    """
    host, port = parse_url(url)
    if not is_loopback(url):
        return False
    try:
        with socket.create_connection((host, port), timeout=2.0) as connection:
            greeting = connection.recv(5)
    except ConnectionRefusedError:
        return True
    except OSError:
        greeting = b""
    if greeting != b"INFO ":
        raise ConfigError(
            f"port {port} on {host} is in use by something that is not a broker; "
            "set broker.url to a free port"
        )
    logger.info("using the broker that answers at %s", without_credentials(url))
    return False
