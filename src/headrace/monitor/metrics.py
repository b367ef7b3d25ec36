"""Step metrics as rows of `metrics.jsonl`."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.errors import RecordError

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends the metrics of optimizer steps to a run folder, each step once.

    >>> metrics = MetricsWriter(run_dir)
    >>> metrics.write(1, {"loss": 0.25, "success/arithmetic": 0.5}, at=1_800_000_000.0)
    """

    def __init__(self, run_dir: Path) -> None:
        """Go on after the last whole row; what a kill left of one after it is cut off.

        Raises:
            RecordError: a row before it cannot be read.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        rows = read_rows(run_dir)
        self._rows = (run_dir / METRICS_FILE).open("a+b")
        self._rows.seek(0)
        self._rows.truncate(self._rows.read().rfind(b"\n") + 1)
        self.last = max((int(row["step"] or 0) for row in rows), default=0)
        """Newest step that has a row; 0 without one."""

    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Append one row and flush it.

        Args:
            step: version that the step produced, above `last`.
            values: metrics by name; `/` groups curves.
            at: Unix seconds.
        """
        self._rows.write(msgspec.json.encode({"step": step, "time": at, **values}) + b"\n")
        self._rows.flush()
        self.last = step

    def close(self) -> None:
        """Close the file."""
        self._rows.close()


def read_rows(run_dir: Path) -> list[dict[str, float | None]]:
    """All rows of `metrics.jsonl`; NaN reads as None, a half-written last line is left out.

    Raises:
        RecordError: a line is not a row of numbers with a step and a time.
    """
    path = run_dir / METRICS_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    rows: list[dict[str, float | None]] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            row = msgspec.json.decode(line, type=dict[str, float | None])
        except msgspec.MsgspecError as error:
            raise RecordError(f"{path}: line {number} is not a row of numbers: {error}") from error
        if not {"step", "time"} <= row.keys():
            raise RecordError(f"{path}: line {number} has no step and time")
        rows.append(row)
    return rows
