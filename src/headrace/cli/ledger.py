"""`headrace ledger`: what each optimizer step trained."""

import argparse
import asyncio
import json
from typing import TYPE_CHECKING

from headrace.cli.runargs import USAGE, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.config import Config

if TYPE_CHECKING:
    from headrace.broker.records import Step

HELP = f"""Print what each optimizer step trained, from the archive and the run log.

{USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per step and line")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    steps = asyncio.run(_steps(resolve(args.items)))
    if args.json:
        for step in steps:
            print(json.dumps(_row(step)))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "groups trained", "filtered", "failed samples", "loss", "weights")
    for step in steps:
        table.add_row(
            str(step.version) + (" (skipped)" if step.skipped else ""),
            _ranges(step.trained),
            _ranges(step.filtered),
            " ".join(step.failed),
            f"{step.metrics.get('loss', float('nan')):.4f}",
            step.weights_hash[:12],
        )
    Console().print(table)
    return 0


async def _steps(config: Config) -> "list[Step]":
    from headrace.broker.records import Step, decode
    from headrace.broker.subjects import RunNames
    from headrace.learner.history import read_history

    subject = RunNames(config.run_name).step
    return [
        decode(entry.data, Step, where=f"{subject} at {entry.seq}")
        async for entry in read_history(config)
        if entry.subject == subject
    ]


def _row(step: "Step") -> dict[str, object]:
    return {
        "step": step.version,
        "version": step.version,
        "lineage": step.lineage,
        "trained": step.trained,
        "filtered": step.filtered,
        "failed": step.failed,
        "skipped": step.skipped,
        "position": step.position,
        "weights_hash": step.weights_hash,
        "metrics": step.metrics,
    }


def _ranges(ordinals: list[int]) -> str:
    """`[1, 2, 3, 7]` as `1-3 7`."""
    parts: list[list[int]] = []
    for ordinal in ordinals:
        if parts and ordinal == parts[-1][1] + 1:
            parts[-1][1] = ordinal
        else:
            parts.append([ordinal, ordinal])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
