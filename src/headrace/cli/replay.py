"""`headrace replay`: trains a finished or running run again from its recorded log."""

import argparse
import asyncio

from headrace.cli.runargs import USAGE, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.config import Config
from headrace.errors import HeadraceError

HELP = f"""Form every batch again from the recorded log, and train it again from the base model.

Each step's groups and weights are compared with the ledger. With --batches the batches alone are
formed, which takes no time. Exit code 1 says that something differs.

{USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    parser.add_argument("--batches", action="store_true", help="form the batches, train nothing")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    steps, weights_hash = asyncio.run(_replay(resolve(args.items), train=not args.batches))
    print(f"{steps} steps replayed, no difference; weights {weights_hash or 'not computed'}")
    return 0


async def _replay(config: Config, *, train: bool) -> tuple[int, str]:
    from headrace.broker.records import Step, decode
    from headrace.broker.subjects import RunNames
    from headrace.learner.history import read_history
    from headrace.learner.machine import Machine
    from headrace.learner.start import run_record
    from headrace.learner.trainer import Trainer, TrainGroup
    from headrace.models import base_model

    names = RunNames(config.run_name)
    trainer: Trainer | None = None
    if train:
        trainer = Trainer.load(
            base_model(config),
            config.learner,
            temperature=config.sampling.temperature,
            dtype=config.model.dtype,
        )
    machine = Machine(run_record(config))
    weights_hash = ""
    async for entry in read_history(config):
        # a step whose groups are not those that the log forms is an error here
        machine.apply(entry)
        if entry.subject != names.step:
            continue
        step = decode(entry.data, Step, where=entry.subject)
        batch = machine.take_batch()
        assert batch is not None, "a step is only accepted after its batch was formed"
        if trainer is None:
            continue
        if step.skipped:
            trainer.pass_over()
        else:
            trainer.train([TrainGroup(g.issued.ordinal, g.trajectories) for g in batch.groups])
        weights_hash = trainer.weights_hash()
        print(f"step {step.version}: {len(batch.groups)} groups, weights {weights_hash[:16]}")
        if weights_hash != step.weights_hash:
            raise HeadraceError(
                f"step {step.version} gives weights {weights_hash[:16]}, but the ledger has "
                f"{step.weights_hash[:16]}: another machine, thread count or library version"
            )
    return machine.state.version, weights_hash
