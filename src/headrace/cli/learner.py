"""`headrace learner`: issues tasks, trains on what comes back, publishes weights."""

import argparse
from pathlib import Path

from headrace.cli.main import report
from headrace.cli.runargs import USAGE, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.errors import HeadraceError

HELP = f"""Run the learner of a run: the one process that decides what is sampled and trained.

It waits for the broker, resumes from the newest checkpoint of run.dir, and ends after the last
step.

{USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = resolve(args.items)
    from headrace import runfolder
    from headrace.monitor.logs import setup_logging

    runfolder.prepare(config)
    setup_logging("learner", "", Path(config.run.dir), run=config.run_name)
    from headrace.learner.start import run_learner  # seconds: torch
    from headrace.process import leave, run_until_stopped

    try:
        run_until_stopped(run_learner(config))
        leave(0)
    except HeadraceError as error:
        leave(report(error))
