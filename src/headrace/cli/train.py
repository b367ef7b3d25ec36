"""`headrace train`: a whole run on this machine, from the public commands."""

import argparse
import logging
import sys
import time
from pathlib import Path

from headrace.cli import runargs
from headrace.errors import HeadraceError, RecordError

logger = logging.getLogger(__name__)

PLAIN_WIDTH = 110
"""Columns of the closing table where the output is not a terminal."""

HELP = f"""\
Run broker, learner and actors on this machine until the run ends; Ctrl-C stops all of them, and
the same command goes on where it stopped. Only public commands are started: any of them may as
well be started by hand, here or elsewhere.

{runargs.USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    runargs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run to the end.

    Raises:
        HeadraceError: the configuration is wrong, or the run ended by an error.
    """
    from rich.console import Console

    from headrace import runfolder
    from headrace.clock import SystemClock
    from headrace.models import preparing_model
    from headrace.monitor.display import closing, display_for
    from headrace.monitor.logs import setup_logging
    from headrace.monitor.placement import headrace_command
    from headrace.monitor.processes import Child
    from headrace.monitor.progress import read_progress, read_summary
    from headrace.monitor.supervisor import Supervisor, supervise

    config = runargs.resolve(args.items)
    run_dir = Path(config.run.dir)
    # before anything starts, so that a changed configuration costs nobody a minute
    runfolder.prepare(config)
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    # what actors say of themselves is no markup
    console = Console(width=width, markup=False, emoji=False)
    finished = read_summary(run_dir)
    if finished is not None:
        console.print(f"{run_dir}: the run is complete", highlight=False, markup=False)
        console.print(closing(finished), highlight=False)
        return 0
    clock = SystemClock()
    started = time.time()
    display = display_for(console, clock)

    def look(supervisor: Supervisor) -> None:
        try:
            progress = read_progress(run_dir)
        except RecordError:
            progress = None  # it is for display alone, and the learner replaces it
        if progress is not None and progress.updated < started:
            progress = None
        display.show(progress, [(post.child.name, post.state) for post in supervisor.posts])

    prepare = preparing_model(config)
    first = None
    if prepare:
        first = Child("model", headrace_command(*prepare), run_dir / "logs" / "model.out")
    try:
        # after the display: in a terminal, rich then moves what is logged above its table
        setup_logging("supervisor", "", run_dir, run=config.run_name)
        if first is not None:
            logger.info("preparing the model %s", config.model.path)
        outcome = supervise(lambda: Supervisor(config, args.items, clock), look, first)
    finally:
        display.close()
    if outcome.error:
        error = HeadraceError(outcome.error)
        error.exit_code = outcome.code
        raise error
    if outcome.code:
        again = f"headrace train {run_dir}"
        logger.info("stopped; `%s` goes on where it stopped", again)
        return outcome.code
    summary = read_summary(run_dir)
    if summary is not None:
        console.print(closing(summary), highlight=False)
    return 0
