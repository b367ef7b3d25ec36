"""Runs on Weights & Biases, by its own client: online, or as files for a later `wandb sync`.

The client hands rows to a process of its own, which sends them again for as long as the network is
away; training never waits for it. A learner that starts again goes on with the same run there.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import ConfigError, ExportError
from headrace.monitor.progress import Progress

logger = logging.getLogger(__name__)

_FINISH_S = 10.0
"""What is not sent this long after the end stays in the run folder, for `wandb sync`."""
_INIT_S = 30.0


class WeightsAndBiases:
    """See `Exporter`."""

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, run: str, identity: str, project: str, mode: str) -> None:
        """Open the run, or go on with it.

        Args:
            run_dir: where its files go, under `wandb/`.
            run: its name there.
            identity: its id there.
            project: project that it belongs to.
            mode: `online` or `offline`.

        Raises:
            ConfigError: the client is not installed, has no key, or does not reach its server.
        """
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"monitor.wandb_project {project!r}: the client is not installed; "
                "pip install 'headrace[wandb]'"
            ) from error
        # nothing of this machine, its code and its console leaves it
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            init_timeout=_INIT_S,
            finish_timeout=_FINISH_S,
        )
        try:
            self._run = wandb.init(
                project=project,
                name=run,
                id=identity,
                resume="allow",
                mode="offline" if mode == "offline" else "online",
                dir=str(run_dir),
                settings=settings,
            )
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"monitor.wandb_project {project!r} cannot be opened: {error}; run `wandb login`, "
                "or set monitor.wandb_mode=offline"
            ) from error
        self._failures = (wandb.Error, OSError)
        logger.info("metrics go to %s", self._run.url or f"{run_dir}/wandb, for `wandb sync`")

    def step(self, version: int, values: Mapping[str, float], at: float) -> None:
        """See `Exporter`."""
        try:
            self._run.log({**values, "time": at}, step=version)
        except self._failures as error:
            raise ExportError(f"its client process is gone ({error})") from error

    def progress(self, progress: Progress) -> None:
        """Shown by its curves alone."""

    def close(self) -> None:
        """See `Exporter`."""
        try:
            self._run.finish()
        except Exception as error:  # without its process it raises anything
            raise ExportError(f"its client process is gone ({error})") from error
