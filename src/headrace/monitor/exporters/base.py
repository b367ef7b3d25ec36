"""What a destination of metrics is, and how the learner serves all of them at once.

An exporter that cannot be opened stops the learner's start with one line. One that breaks later is
logged and dropped: no destination ever stops a run, and `metrics.jsonl` has every row anyway.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from headrace.configmonitor import Monitor
from headrace.errors import ExportError
from headrace.monitor.progress import Progress

logger = logging.getLogger(__name__)


class Exporter(Protocol):
    """One destination; each method raises `ExportError` when it can no longer be reached."""

    name: str
    """What people call it."""

    def step(self, version: int, values: Mapping[str, float], at: float) -> None:
        """Take the metrics of one optimizer step.

        Args:
            version: version that the step produced; rises, and never comes twice.
            values: metrics by name; `/` groups them.
            at: Unix seconds.
        """

    def progress(self, progress: Progress) -> None:
        """Take the state of the run; called about once a second."""

    def close(self) -> None:
        """Hand over what is left and let go."""


class Exporters:
    """Several exporters as one; those that fail are logged and dropped."""

    def __init__(self) -> None:
        self._alive: list[Exporter] = []

    @classmethod
    def open(cls, config: Monitor, run_dir: Path, run: str, identity: str) -> "Exporters":
        """Open every destination that the configuration names.

        Args:
            config: which ones.
            run_dir: run folder.
            run: name of the run.
            identity: of the run's log: the same whenever its learner starts again.

        Raises:
            ConfigError: one of them cannot be opened.
        """
        opened = cls()
        try:
            if config.tensorboard:
                from headrace.monitor.exporters.tensorboard import TensorBoard

                opened.add(TensorBoard(run_dir))
            if config.prometheus_port:
                from headrace.monitor.exporters.prometheus import Prometheus

                opened.add(Prometheus(run, config.prometheus_address, config.prometheus_port))
            if config.wandb_project:
                from headrace.monitor.exporters.wandb import WeightsAndBiases

                opened.add(
                    WeightsAndBiases(
                        run_dir, run, identity, config.wandb_project, config.wandb_mode
                    )
                )
        except BaseException:
            opened.close()
            raise
        return opened

    def add(self, exporter: Exporter) -> None:
        """Serve one more."""
        self._alive.append(exporter)

    def step(self, version: int, values: Mapping[str, float], at: float) -> None:
        """See `Exporter`."""
        self._each(lambda exporter: exporter.step(version, values, at))

    def progress(self, progress: Progress) -> None:
        """See `Exporter`."""
        self._each(lambda exporter: exporter.progress(progress))

    def close(self) -> None:
        """See `Exporter`."""
        self._each(lambda exporter: exporter.close())

    def _each(self, call: Callable[[Exporter], None]) -> None:
        for exporter in list(self._alive):
            try:
                call(exporter)
            except ExportError as error:
                self._alive.remove(exporter)
                logger.warning(
                    "%s gets no more metrics until the learner starts again: %s",
                    exporter.name,
                    error,
                )
