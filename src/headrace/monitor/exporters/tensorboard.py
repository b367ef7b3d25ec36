"""TensorBoard curves in the run folder; torch is not imported.

Records are written by the step itself. TensorBoard's own `EventFileWriter` writes them in a thread,
which a full disk ends with a traceback that nobody can catch.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

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
            folder.mkdir(exist_ok=True)
            now = time.time()
            name = f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}"
            self._records = RecordWriter((folder / name).open("ab", buffering=0))
            self._write(Event(wall_time=now, file_version="brain.Event:2"))
        except OSError as error:
            raise ConfigError(
                f"monitor.tensorboard: {folder} cannot be written ({error.strerror}); make room "
                "there, or set monitor.tensorboard=false"
            ) from error

    def step(self, version: int, values: Mapping[str, float], at: float) -> None:
        """See `Exporter`."""
        curves = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        try:
            self._write(Event(wall_time=at, step=version, summary=Summary(value=curves)))
        except OSError as error:
            self._records.close()
            raise _lost(error) from error

    def progress(self, progress: Progress) -> None:
        """Shown by its curves alone."""

    def close(self) -> None:
        """See `Exporter`."""
        try:
            self._records.close()
        except OSError as error:
            raise _lost(error) from error

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _lost(error: OSError) -> ExportError:
    return ExportError(f"its file cannot be written ({error.strerror})")
