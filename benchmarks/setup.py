"""How long set-up takes from nothing, in a fresh clone with an empty environment, and again.

headrace bench setup
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from headrace.benchrows import store

ROOT = Path(__file__).resolve().parents[1]


def seconds(command: list[str], folder: Path) -> float:
    """Wall time of a command that must succeed."""
    environment = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Clone, set up twice, store one row."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "headrace"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        first = seconds(["make", "setup"], clone)
        again = seconds(["make", "setup"], clone)
    store(__file__, {"setup_s": round(first, 1), "again_s": round(again, 3)})


if __name__ == "__main__":
    main()
