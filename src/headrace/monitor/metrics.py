"""Step metrics as rows of `metrics.jsonl` and as TensorBoard curves, from one call."""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsWriter:
    """Appends the metrics of optimizer steps to a run folder; torch is not imported.

    >>> with MetricsWriter(run_dir) as metrics:
    ...     metrics.write(1, {"loss/mean": 0.25, "tokens/trained": 812.0})
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._rows = (run_dir / METRICS_FILE).open("ab")
        self._events: EventFileWriter | None = None

    def write(self, step: int, values: "Mapping[str, float]", *, at: float | None = None) -> None:
        """Append one row and one set of curve points, and flush both.

        Args:
            step: version that the step produced.
            values: metrics by name; `/` groups curves.
            at: Unix seconds; now where not given.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        at = time.time() if at is None else at
        row = {"step": step, "time": at, **values}
        self._rows.write(msgspec.json.encode(row) + b"\n")
        self._rows.flush()
        if self._events is None:
            self._events = EventFileWriter(str(self._run_dir / TENSORBOARD_FOLDER))
        curves = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._events.add_event(Event(wall_time=at, step=step, summary=Summary(value=curves)))
        self._events.flush()

    def close(self) -> None:
        """Flush and close both files."""
        self._rows.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_rows(run_dir: Path) -> list[dict[str, float | None]]:
    """All rows of `metrics.jsonl`; NaN reads as None, a half-written last line is left out."""
    try:
        data = (run_dir / METRICS_FILE).read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    return [msgspec.json.decode(line, type=dict[str, float | None]) for line in whole.splitlines()]
