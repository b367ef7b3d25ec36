"""TensorBoard curves in the run folder; torch is not imported."""

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from headrace.errors import ExportError
from headrace.monitor.progress import Progress

FOLDER = "tensorboard"


class TensorBoard:
    """See `Exporter`."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path) -> None:
        self._events = EventFileWriter(str(run_dir / FOLDER))

    def step(self, version: int, values: Mapping[str, float], at: float) -> None:
        """See `Exporter`."""
        curves = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        try:
            self._events.add_event(Event(wall_time=at, step=version, summary=Summary(value=curves)))
            self._events.flush()
        except OSError as error:
            raise ExportError(f"its file cannot be written ({error.strerror})") from error

    def progress(self, progress: Progress) -> None:
        """Shown by its curves alone."""

    def close(self) -> None:
        """See `Exporter`."""
        self._events.close()
