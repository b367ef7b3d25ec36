"""`headrace report`: one self-contained HTML page about a run."""

import argparse
import asyncio
import os
from contextlib import suppress
from pathlib import Path

from headrace.cli.runargs import USAGE, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.errors import ConfigError

HELP = f"""Write one HTML page about a run: success, curves, time, failures, transcripts.

The page loads nothing from anywhere and can be sent as it is. A run that goes on is shown as it is
now.

{USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in the run folder"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from headrace.report.page import render

    config = resolve(args.items)
    path: Path = args.output or Path(config.run.dir) / "report.html"
    if args.output and not os.path.isdir(path.parent):
        raise ConfigError(f"--output {path}: the folder {path.parent} does not exist; make it")
    if os.path.isdir(path):
        raise ConfigError(f"--output {path} is a folder; name a file")
    page = asyncio.run(render(config))
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
    print(path)
    return 0
