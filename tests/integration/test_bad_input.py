"""What a user gets wrong ends in one clear line that names the place and the remedy."""

import socket
from pathlib import Path

import pytest

from headrace.broker.connection import connected
from headrace.broker.server import bundled_server
from headrace.broker.state import RunState
from headrace.broker.subjects import RunNames
from headrace.config import load, to_json
from tests.chaos.commands import ROOT, Commands

TINY = str(ROOT / "examples" / "tiny.toml")


def refused(run: Commands, role: str, *settings: str, code: int) -> str:
    """Run a command that must fail; returns its one line on stderr without the log's lines."""
    result = run.call(role, *run.items, *settings)
    assert result.returncode == code, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("headrace: error: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return errors[0]


@pytest.mark.parametrize("role", ["broker", "learner", "actor", "status", "ledger", "train"])
def test_a_mistyped_key_is_named_with_the_nearest_right_one(role: str, tmp_path: Path) -> None:
    with Commands(tmp_path / "run") as run:
        line = refused(run, role, "learner.stepz=3", code=2)
        assert "learner.stepz" in line
        assert "did you mean 'learner.steps'?" in line
        assert not run.run_dir.exists(), "nothing was begun"


def test_an_unreachable_broker_is_named_with_the_deadline(tmp_path: Path) -> None:
    with Commands(tmp_path / "run", "broker.connect_s=0.5") as run:
        for role in ("learner", "actor"):
            line = refused(run, role, code=1)
            assert f"no broker answers at {run.url}" in line
            assert "headrace broker" in line


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with Commands(tmp_path / "run") as run, socket.socket() as taken:
        taken.bind(("127.0.0.1", int(run.url.rpartition(":")[2])))
        taken.listen()
        line = refused(run, "broker", code=2)
        assert "Address already in use" in line
        assert "broker.url=nats://127.0.0.1:PORT" in line


def test_a_folder_with_another_configuration_is_refused_with_the_difference(
    tmp_path: Path,
) -> None:
    with Commands(tmp_path / "run") as run:
        run.run_dir.mkdir()
        (run.run_dir / "config.json").write_bytes(to_json(load([Path(TINY)], run.items[1:])))
        for role in ("learner", "train"):
            line = refused(run, role, "learner.lr=0.5", code=2)
            assert "learner.lr: 0.001 -> 0.5" in line


@pytest.mark.parametrize("role", ["broker", "learner", "train"])
def test_a_run_folder_that_cannot_be_written_is_named(role: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Commands(tmp_path / "run") as run:
        line = refused(run, role, f"run.dir={tmp_path}/file/run", code=2)
        assert f"run.dir {tmp_path}/file/run" in line
        assert "Not a directory" in line
        assert "choose another folder" in line


@pytest.mark.nats
async def test_what_the_run_on_the_broker_contradicts_is_refused(tmp_path: Path) -> None:
    with Commands(tmp_path / "run", "model.recipe=''") as run:
        port = int(run.url.rpartition(":")[2])
        async with (
            bundled_server(tmp_path / "nats", port=port),
            connected(run.url, name="t", deadline_s=30) as connection,
        ):
            line = refused(run, "learner", "model.path=/nowhere/model", code=2)
            assert "/nowhere/model" in line
            line = refused(
                run, "learner", "domains=[{id='paritty'}]", f"run.dir={tmp_path}/b", code=2
            )
            assert "did you mean 'parity'" in line
            # a learner made the run, so an actor with other settings must not join it
            state = RunState(connection, RunNames("run"))
            await state.put("config", to_json(load([Path(TINY)], run.items[1:])))
            line = refused(run, "actor", "sampling.temperature=0.7", code=2)
            assert "sampling.temperature: 1.0 -> 0.7" in line


def test_an_unknown_run_folder_or_command_is_named(tmp_path: Path) -> None:
    with Commands(tmp_path / "run") as run:
        result = run.call("ledger", str(tmp_path / "nothing"))
        assert result.returncode == 2
        assert "neither a TOML file, nor an existing run folder" in result.stderr
        result = run.call("leaner")
        assert result.returncode == 2
        assert "did you mean 'learner'" in result.stderr
