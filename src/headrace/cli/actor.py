"""`headrace actor`: samples trajectories for a run."""

import argparse
from pathlib import Path

from headrace.cli.main import report
from headrace.cli.runargs import USAGE, names_configuration, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.errors import HeadraceError

HELP = f"""Sample trajectories for a run, with vLLM and the run's environments.

Actors keep nothing and may join and leave at any time: SIGTERM hands back what one holds, and what
a killed one held is done by others. An actor ends when its run is finished.

{USAGE}

With key=value settings alone (broker.url and run.name) it takes the run's configuration from the
broker, and needs no file of the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = resolve(args.items)
    from headrace.actor.process import run_actor
    from headrace.monitor.logs import setup_logging
    from headrace.process import leave, new_ident, run_until_stopped

    ident = new_ident()
    setup_logging("actor", ident, Path(config.run.dir), run=config.run_name)
    adopt = not names_configuration(args.items)
    try:
        run_until_stopped(run_actor(config, ident, adopt=adopt))
        leave(0)
    except HeadraceError as error:
        leave(report(error))
