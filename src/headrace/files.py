"""Durable files: what was written is on the disk."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Make what was written to a file, or what was renamed in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
