"""Which task comes next. Every choice is a function of the seed and the group's ordinal."""

import hashlib
import itertools
import logging
import random

from headrace.broker.records import TaskRef
from headrace.config import Config
from headrace.environments.generate import distinct_tasks
from headrace.environments.protocol import Domain
from headrace.environments.registry import get_domain
from headrace.errors import ConfigError

logger = logging.getLogger(__name__)


class Curriculum:
    """Draws training tasks by the shares of the mix, and lists the held-out probes in order."""

    def __init__(self, config: Config) -> None:
        """Look the domains up and list the probes.

        Raises:
            ConfigError: there is no domain, one is unknown, or a level does not exist.
        """
        if not config.domains:
            raise ConfigError("the run has no domains: add [[domains]] tables with an id")
        self._seed = config.run.seed
        self._mix = config.domains
        self._domains: dict[str, Domain] = {}
        held_out: list[list[TaskRef]] = []
        for entry in config.domains:
            domain = self._domains[entry.id] = get_domain(entry.id)
            if not 0 <= entry.level < domain.levels:
                raise ConfigError(
                    f"domain {entry.id!r} has levels 0 to {domain.levels - 1}, got {entry.level}"
                )
            asked = config.probes.tasks
            tasks = distinct_tasks(domain, level=entry.level, split="heldout", count=asked)
            held_out.append([task.ref for task in tasks])
            if len(tasks) < asked:
                logger.info(
                    "%s level %d has %d held-out tasks, fewer than probes.tasks=%d",
                    *(entry.id, entry.level, len(tasks), asked),
                )
        # one of each domain in turn, so that an evaluation does not end on the slowest domain
        turns = itertools.zip_longest(*held_out)
        self._probes = [ref for turn in turns for ref in turn if ref is not None]

    @property
    def probes(self) -> int:
        """Number of held-out probes of one evaluation."""
        return len(self._probes)

    def train_task(self, ordinal: int) -> TaskRef:
        """Task of the training group with this ordinal."""
        weights = [entry.weight for entry in self._mix]
        (entry,) = random.Random(self.seed(ordinal)).choices(self._mix, weights)
        return self._domains[entry.id].task(ordinal, split="train", level=entry.level).ref

    def probe_task(self, number: int) -> TaskRef:
        """Held-out task of the probe with this number; the same ones at every evaluation."""
        return self._probes[number]

    def seed(self, ordinal: int) -> int:
        """Seed of a group's sampling and environment, below 2^31."""
        digest = hashlib.sha256(f"{self._seed}:{ordinal}".encode()).digest()
        return int.from_bytes(digest[:4], "little") >> 1

    def pool(self, domain: str) -> str:
        """Task pool of a domain."""
        return next(entry.pool for entry in self._mix if entry.id == domain)

    @property
    def pools(self) -> list[str]:
        """Pools of all domains."""
        return sorted({entry.pool for entry in self._mix})
