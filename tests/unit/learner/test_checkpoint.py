"""A checkpoint is whole or absent, wherever the process is killed."""

from pathlib import Path

import pytest

from headrace.errors import CheckpointError
from headrace.learner import checkpoint as checkpoints
from headrace.learner.checkpoint import LearnerState
from headrace.learner.machine import Snapshot
from headrace.runfolder import existing_checkpoints


class ScriptedTrainer:
    """Writes one file; `tests/unit/learner/test_trainer.py` proves what the real one writes."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.full = False

    def save(self, folder: Path) -> None:
        (folder / "resume").mkdir(parents=True)
        if self.full:
            raise CheckpointError("no space left on device")
        (folder / "model.safetensors").write_text(f"{self.version}")


def save(run_dir: Path, version: int, position: int, *, keep: int = 2, full: bool = False) -> Path:
    trainer = ScriptedTrainer(version)
    trainer.full = full
    state = LearnerState(
        identity="id", lineage=1, snapshot=Snapshot(position=position), totals={}, staleness={}
    )
    return checkpoints.save(run_dir, trainer, checkpoints.encode(state), keep=keep)  # type: ignore[arg-type]


def position(run_dir: Path) -> int:
    return checkpoints.read(existing_checkpoints(run_dir)[-1]).snapshot.position


def test_the_newest_are_kept_and_the_last_position_of_a_version_wins(tmp_path: Path) -> None:
    for version in range(4):
        save(tmp_path, version, version * 10)
    save(tmp_path, 3, 35)
    assert [p.name for p in existing_checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    assert position(tmp_path) == 35
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000003",
    ]


def test_a_kill_between_the_renames_of_a_rewrite_loses_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 10)
    folder.rename(folder.with_name(f".{folder.name}.old"))
    assert existing_checkpoints(tmp_path) == []
    checkpoints.recover(tmp_path)
    assert position(tmp_path) == 10


def test_a_kill_while_the_old_one_is_removed_does_not_stop_the_next_save(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 10)
    old = folder.with_name(f".{folder.name}.old")
    old.mkdir()
    (old / "half").write_text("removed half")
    half = folder.with_name(".step-000002.tmp")
    half.mkdir()
    (half / "model.safetensors").write_text("written half")
    save(tmp_path, 1, 20)
    assert position(tmp_path) == 20
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_failed_save_says_what_to_do_and_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1, 10)
    with pytest.raises(
        CheckpointError, match=r"no space left.*continues from the checkpoint before"
    ):
        save(tmp_path, 2, 20, full=True)
    assert position(tmp_path) == 10
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
