"""How benchmarks store what they measure: one JSON line per row, with commit, machine and load."""

import functools
import json
import os
import platform
import subprocess
import time
from pathlib import Path


def store(script: str, row: dict[str, object]) -> None:
    """Append a row to `results/<script>.jsonl` beside a benchmark script, and print it.

    Args:
        script: the benchmark's `__file__`.
        row: what was measured; names carry their units.
    """
    path = Path(script).resolve()
    who = {"benchmark": path.stem, "commit": commit(path.parent), "time": round(time.time())}
    whole = who | machine() | row
    path = path.parent / "results" / f"{path.stem}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as sink:
        sink.write(json.dumps(whole) + "\n")
    print(json.dumps(row, indent=2))


def machine() -> dict[str, object]:
    """What the figures were measured on, and how busy it was (1 and 5 minute load averages)."""
    return {
        "machine": f"{_cpu()}, {os.cpu_count()} cores",
        "load": [round(load, 1) for load in os.getloadavg()[:2]],
    }


@functools.cache
def commit(folder: Path) -> str:
    """Commit of the checkout that holds a folder, with `-dirty` where files differ from it.

    Stored results and their plots do not count as a difference. It is asked for once, because a
    checkout may move on while a benchmark runs.
    """
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    made = [":(top,exclude)benchmarks/results", ":(top,exclude)docs/*.svg"]
    changed = _git(folder, "status", "--porcelain", "--", ":/", *made)
    return (head or "unknown") + ("-dirty" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
