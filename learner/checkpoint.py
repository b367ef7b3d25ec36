"""Checkpoints: the trainer's files and the machine's snapshot in one folder, whole or absent.

The snapshot carries the open groups with their samples, so its read position is the cursor: nothing
before it is needed again, and the log may be purged up to it.
"""

import shutil
from pathlib import Path

import msgspec

from headrace.errors import CheckpointError
from headrace.files import flush
from headrace.learner import checkpoint_files as files
from headrace.learner.machine import Snapshot
from headrace.learner.trainer import Trainer
from headrace.runfolder import existing_checkpoints

STATE_FILE = f"{files.RESUME}/learner.msgpack"


class LearnerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds beside the trainer's files."""

    identity: str
    """Of the log that `snapshot.position` refers to."""
    lineage: int
    snapshot: Snapshot
    totals: dict[str, float]
    """Running totals that the summary needs: tokens, seconds by activity."""
    staleness: dict[int, int]
    """Trained tokens by lag in versions."""


def folder_of(run_dir: Path, version: int) -> Path:
    """Folder of the checkpoint of one version."""
    return run_dir / "checkpoints" / f"step-{version:06d}"


def encode(state: LearnerState) -> bytes:
    """Bytes of a learner's state, for `save`."""
    return msgspec.msgpack.encode(state)


def save(run_dir: Path, trainer: Trainer, state: bytes, *, keep: int) -> Path:
    """Write a checkpoint aside, rename it, and remove those beyond the newest `keep`.

    Args:
        run_dir: folder of the run.
        trainer: weights, masters, optimizer; it must not train meanwhile.
        state: what `encode` gave.
        keep: checkpoints that stay.

    Raises:
        CheckpointError: it cannot be written; earlier ones are untouched.
    """
    folder = folder_of(run_dir, trainer.version)
    aside = folder.with_name(f".{folder.name}.tmp")
    try:
        recover(run_dir)
        trainer.save(aside)
        (aside / STATE_FILE).write_bytes(state)
        for written in (aside / STATE_FILE, aside / files.RESUME, aside):
            flush(written)
        if folder.exists():
            # the same version at a later read position; the weights are the same
            folder.replace(_set_aside(folder))
        aside.replace(folder)
        flush(folder.parent)
        shutil.rmtree(_set_aside(folder), ignore_errors=True)
        for stale in existing_checkpoints(run_dir)[:-keep]:
            shutil.rmtree(stale)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written ({error}); free space and start again, the "
            "run continues from the checkpoint before"
        ) from error
    return folder


def recover(run_dir: Path) -> None:
    """Put right what a kill in the middle of `save` left: a folder is whole, or it goes."""
    parent = run_dir / "checkpoints"
    for old in parent.glob(".step-*.old"):
        folder = parent / old.name[1 : -len(".old")]
        if folder.exists():
            shutil.rmtree(old)
        else:
            old.replace(folder)
    for half in parent.glob(".step-*.tmp"):
        shutil.rmtree(half)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def read(folder: Path) -> LearnerState:
    """State of a checkpoint.

    Raises:
        CheckpointError: it is missing or corrupt.
    """
    path = folder / STATE_FILE
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=LearnerState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of a learner: {error}") from error
