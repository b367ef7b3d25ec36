"""How every command that works on a run is told which: files, a run folder, `key=value`."""

import argparse
import os
from pathlib import Path

from headrace.config import Config, Run, load
from headrace.errors import ConfigError

CONFIG_FILE = "config.json"

USAGE = """\
A run is given by TOML files (merged from left to right) or by an existing run folder, and by
key=value settings that come after them, in any order:
  examples/tiny.toml run.dir=runs/first learner.steps=4
`headrace config keys` explains every key."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments that `resolve` reads, as `args.items`."""
    parser.add_argument(
        "items",
        nargs="+",
        metavar="RUN",
        help="RUN.toml, an existing run folder, or section.key=value",
    )


def resolve(items: list[str]) -> Config:
    """Resolve the configuration that the arguments name.

    Raises:
        ConfigError: a file or folder is missing, a key is unknown or a value is wrong.
    """
    folders, files, settings = _sort(items)
    if folders and (files or len(folders) > 1):
        raise ConfigError(
            f"{folders[0]}: a run folder already holds its whole configuration; "
            "give it alone, with key=value settings only"
        )
    if not folders:
        return load(files, settings)
    folder = folders[0]
    stored = load([folder / CONFIG_FILE], [])
    if Path(stored.run.dir).resolve() == folder.resolve():
        return load([folder / CONFIG_FILE], settings)
    # the folder was moved, or is named from another directory; the run keeps its name
    here = [f"run.dir={_quoted(str(folder))}"]
    if stored.run_name != Config(run=Run(dir=str(folder))).run_name:
        here.append(f"run.name={_quoted(stored.run_name)}")
    return load([folder / CONFIG_FILE], here + settings)


def names_configuration(items: list[str]) -> bool:
    """Whether the arguments name a file or folder, and not only settings."""
    folders, files, _ = _sort(items)
    return bool(folders or files)


def _sort(items: list[str]) -> tuple[list[Path], list[Path], list[str]]:
    folders: list[Path] = []
    files: list[Path] = []
    settings: list[str] = []
    for item in items:
        path = Path(item)
        # of `os.path`: a long setting is no name that a file system knows, and no error
        if os.path.isdir(item):
            if not os.path.isfile(path / CONFIG_FILE):
                raise ConfigError(
                    f"{item}: not a run folder (it holds no {CONFIG_FILE}); "
                    "give the run's TOML file instead"
                )
            folders.append(path)
        elif path.suffix == ".toml" and ("=" not in item or os.path.isfile(item)):
            files.append(path)
        elif "=" in item:
            settings.append(item)
        else:
            raise ConfigError(
                f"{item}: neither a TOML file, nor an existing run folder, nor section.key=value"
            )
    return folders, files, settings


def _quoted(text: str) -> str:
    """Keep a path that looks like a number or a date a string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
