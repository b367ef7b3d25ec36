"""What a model can do before any training: success and spread by domain, level and temperature.

Levels of a run are chosen from this table. It samples as `headrace eval` does, in one engine for
all rows.

    python benchmarks/base_model.py models/smollm2-135m-instruct --temperatures 0.5 0.6 0.8
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.actor.chat import ChatFormat
from headrace.actor.engine import Engine
from headrace.actor.episode import Limits
from headrace.actor.evaluate import Conditions, Exam, evaluate, serving
from headrace.actor.passrates import Sample, report
from headrace.clock import SystemClock
from headrace.config import Actors
from headrace.environments.generate import distinct_tasks
from headrace.environments.registry import get_domain

ACTORS = Actors(max_model_len=512, samples_in_flight=48)
HEADER = (
    "| domain | level | temperature | success | first turn | informative groups | score | turns |"
    " prompt tokens | sampled tokens | jailed CPU s | failures |"
)


def row(samples: Sequence[Sample], temperature: float) -> str:
    """One line of the table."""
    made = report(samples, [1])
    judged = [sample for sample in samples if sample.judged]
    scores: dict[int, set[float]] = {}
    for sample in judged:
        scores.setdefault(sample.index, set()).add(sample.score)
    spread = sum(len(each) > 1 for each in scores.values())
    turns = sum(len(sample.turns) for sample in judged)
    cells = [
        made.domain,
        str(made.level),
        f"{temperature:g}",
        f"{made.success_by_turn[-1]:.3f}",
        f"{made.success_by_turn[0]:.3f}",
        f"{spread / max(1, len(scores)):.2f}",
        f"{made.score:.3f}",
        f"{turns / max(1, len(judged)):.2f}",
        f"{made.prompt_tokens:.0f}",
        f"{made.sampled_tokens:.1f}",
        f"{made.jail_cpu_s:.3f}",
        str(made.unjudged),
    ]
    return f"| {' | '.join(cells)} |"


async def measure(engine: Engine, chat: ChatFormat, exam: Exam, args: argparse.Namespace) -> None:
    """Sample one domain and level at every temperature and print their rows."""
    for temperature in args.temperatures:
        conditions = Conditions(
            temperature=temperature,
            limits=Limits(max_new_tokens=256, max_model_len=ACTORS.max_model_len, deadline_s=300.0),
            attempts=1,
            in_flight=ACTORS.samples_in_flight,
            seed=0,
        )
        samples = await evaluate(
            engine, chat, [exam], conditions, SystemClock(), lambda sample: None
        )
        print(row(samples, temperature), flush=True)
        for sample in [sample for sample in samples if sample.number == 0][: args.show]:
            print(f"    {sample.turns!r} {sample.kind} {sample.evidence}", file=sys.stderr)


async def main(args: argparse.Namespace) -> None:
    """Start the engine on the model's own weights and measure."""
    torch.set_num_threads(1)
    async with serving(args.model, "bfloat16", ACTORS) as (engine, chat):
        begun = time.monotonic()
        print(HEADER)
        print("|" + " --- |" * HEADER.count(" | ") + " --- |")
        for name in args.domains:
            domain = get_domain(name)
            for level in args.levels or range(domain.levels):
                tasks = distinct_tasks(domain, level=level, split=args.split, count=args.groups)
                await measure(engine, chat, Exam(domain, tasks, args.group_size), args)
        print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)


def parse() -> argparse.Namespace:
    """Arguments of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--domains", nargs="+", default=["python_functions", "arithmetic"])
    parser.add_argument("--levels", nargs="+", type=int, help="all levels of each by default")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.5, 0.6])
    parser.add_argument("--groups", type=int, default=32, help="tasks per row")
    parser.add_argument("--group-size", type=int, default=8, help="samples per task")
    parser.add_argument("--split", default="train")
    parser.add_argument("--show", type=int, default=0, help="samples to print per row")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parse()))
