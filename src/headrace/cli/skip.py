"""`headrace skip`: passes over the batch of one step (a poison batch)."""

import argparse
import asyncio

from headrace.cli.runargs import USAGE, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.config import Config
from headrace.errors import ConfigError

HELP = f"""Record that the batch of one coming step must not be trained.

For a batch on which the learner fails again and again. The step is counted, the weights stay, and
the ledger shows it. Run it while the broker serves the run; then start the learner again.

{USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, required=True, help="the step to pass over")
    parser.add_argument("--reason", required=True, help="why; kept in the log")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    asyncio.run(_skip(resolve(args.items), args.step, args.reason))
    print(f"step {args.step} will be passed over")
    return 0


async def _skip(config: Config, version: int, reason: str) -> None:
    from headrace.broker.connection import connected
    from headrace.broker.records import Skip, Step, decode
    from headrace.broker.runlog import RunLog
    from headrace.broker.state import RunState
    from headrace.broker.subjects import RunNames

    names = RunNames(config.run_name)
    async with connected(config.broker.url, name="skip", deadline_s=5) as connection:
        log = await RunLog.attach(connection, names)
        last = await log.last(names.step)
        done = decode(last.data, Step, where=names.step).version if last else 0
        # checkpoints let the records of steps be purged, whose weights were announced before
        current = await RunState(connection, names).current()
        done = max(done, current.version if current else 0)
        if not done < version <= config.learner.steps:
            raise ConfigError(
                f"step {version} cannot be passed over: the ledger ends at step {done} of "
                f"{config.learner.steps}"
            )
        before = await log.last(names.skip)
        after = before.seq if before else 0
        await log.append(
            Skip(version=version, reason=reason), after=after, message_id=f"skip-{version}-{after}"
        )
