"""TensorBoard curves in the run folder; torch is not imported."""

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from headrace.errors import ConfigError, ExportError
from headrace.monitor.progress import Progress

FOLDER = "tensorboard"


class TensorBoard:
    """See `Exporter`."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path) -> None:
        """Begin a file of the run folder.

        Raises:
            ConfigError: it cannot be written.
        """
        folder = run_dir / FOLDER
        try:
            self._events = EventFileWriter(str(folder))
        except OSError as error:
            raise ConfigError(
                f"monitor.tensorboard: {folder} cannot be written ({error.strerror}); make room "
                "there, or set monitor.tensorboard=false"
            ) from error

    def step(self, version: int, values: Mapping[str, float], at: float) -> None:
        """See `Exporter`."""
        curves = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        try:
            self._events.add_event(Event(wall_time=at, step=version, summary=Summary(value=curves)))
            self._events.flush()
        except OSError as error:
            raise _lost(error) from error

    def progress(self, progress: Progress) -> None:
        """Shown by its curves alone."""

    def close(self) -> None:
        """See `Exporter`."""
        try:
            self._events.close()
        except OSError as error:
            raise _lost(error) from error


def _lost(error: OSError) -> ExportError:
    return ExportError(f"its file cannot be written ({error.strerror})")
