"""Names of a run's streams, subjects and durable consumers; nothing else spells them."""

import re
from dataclasses import dataclass

from headrace.errors import ConfigError

_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True)
class RunNames:
    """Every broker name that belongs to one run.

    >>> RunNames("first-light").sample(12, 3)
    'headrace.first-light.log.sample.12.3'
    """

    run: str

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.run):
            raise ConfigError(
                f"run.name {self.run!r} is not a run name: use 1 to 64 of a-z, 0-9, '-' and '_', "
                "starting with a letter or digit"
            )

    @property
    def prefix(self) -> str:
        """Common prefix of all subjects of the run."""
        return f"headrace.{self.run}"

    @property
    def log_stream(self) -> str:
        """Stream that holds the run log."""
        return f"HEADRACE_{self.run}_LOG"

    @property
    def tasks_stream(self) -> str:
        """Work-queue stream of tasks."""
        return f"HEADRACE_{self.run}_TASKS"

    @property
    def starts_stream(self) -> str:
        """Stream of attempt starts, counted per group."""
        return f"HEADRACE_{self.run}_STARTS"

    @property
    def lease_stream(self) -> str:
        """Stream of expiring leases."""
        return f"HEADRACE_{self.run}_LEASES"

    @property
    def dead_stream(self) -> str:
        """Stream that keeps records which did not decode or verify."""
        return f"HEADRACE_{self.run}_DEAD"

    @property
    def model_bucket(self) -> str:
        """Object store of the tokenizer and model configuration files."""
        return f"HEADRACE_{self.run}_MODEL"

    @property
    def weights_stream(self) -> str:
        """Stream of weight manifests and chunks."""
        return f"HEADRACE_{self.run}_WEIGHTS"

    @property
    def state_bucket(self) -> str:
        """Key-value bucket of run state, written by the learner only."""
        return f"HEADRACE_{self.run}_STATE"

    @property
    def config(self) -> str:
        """Subject of `RunConfig` records."""
        return f"{self.prefix}.log.config"

    @property
    def issued(self) -> str:
        """Subject of `Issued` records."""
        return f"{self.prefix}.log.issued"

    @property
    def step(self) -> str:
        """Subject of `Step` records."""
        return f"{self.prefix}.log.step"

    @property
    def skip(self) -> str:
        """Subject of `Skip` records."""
        return f"{self.prefix}.log.skip"

    def sample(self, group: int | str, index: int | str) -> str:
        """Subject of the one record that decides slot (group, index)."""
        return f"{self.prefix}.log.sample.{group}.{index}"

    def dead_letter(self, group: int | str, index: int | str) -> str:
        """Subject that keeps the bytes of a record that did not decode or verify."""
        return f"{self.prefix}.dead.{group}.{index}"

    def task(self, pool: str, group: int | str) -> str:
        """Subject of the queued task of one group; `>` or `*` as the group selects all."""
        return f"{self.prefix}.tasks.{pool}.{group}"

    def pool_consumer(self, pool: str) -> str:
        """Durable consumer that hands out the tasks of one pool."""
        return f"pool_{pool}"

    def start(self, group: int | str) -> str:
        """Subject of the attempt starts of one group."""
        return f"{self.prefix}.start.{group}"

    def lease(self, role: str, ident: str) -> str:
        """Subject of one process's lease."""
        return f"{self.prefix}.lease.{role}.{ident}"

    def weights(self, kind: str, version: int | str, part: int | str = "manifest") -> str:
        """Subject of a manifest or chunk of an anchor or delta."""
        return f"{self.prefix}.weights.{kind}.{version}.{part}"

    def control(self, ident: str) -> str:
        """Request subject on which one actor answers weight-transfer rounds."""
        return f"{self.prefix}.control.{ident}"
