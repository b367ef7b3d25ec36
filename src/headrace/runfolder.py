"""The run folder: its configuration, the same as before at every start, and its checkpoints."""

import subprocess
from pathlib import Path

from headrace.config import Config, difference, from_json, to_json
from headrace.errors import ConfigError, RunMismatchError


def prepare(config: Config) -> None:
    """Make the run folder and write the resolved configuration, or compare it with the one there.

    Raises:
        RunMismatchError: the folder holds a run with another configuration.
        ConfigError: the folder cannot be written.
    """
    run_dir = Path(config.run.dir)
    path = run_dir / "config.json"
    if path.exists():
        refuse_difference(
            from_json(path.read_bytes(), where=str(path)), config, f"run folder {run_dir}"
        )
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "commit.txt").write_text(_commit() + "\n")
        aside = path.with_suffix(".tmp")
        aside.write_bytes(to_json(config))
        aside.replace(path)
    except OSError as error:
        raise ConfigError(
            f"run.dir {run_dir}: {error.filename} cannot be written ({error.strerror}); "
            "choose another folder or make room there"
        ) from error


def existing_checkpoints(run_dir: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step-[0-9]*[0-9]"))


def refuse_difference(old: Config, new: Config, where: str) -> None:
    """Compare what every process of a run must agree on.

    Raises:
        RunMismatchError: a value differs; all that do are listed.
    """
    changed = difference(old, new)
    if changed:
        raise RunMismatchError(
            f"{where} was started with another configuration ({'; '.join(changed)}); use the old "
            "values, or start a new run with another run.dir"
        )


def _commit() -> str:
    """Commit of the code that runs, where it runs from a checkout."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip()
