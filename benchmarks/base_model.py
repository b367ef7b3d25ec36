"""What a model can do before any training: success and spread by domain, level and temperature.

Levels of a run are chosen from this table. It runs whole episodes as an actor does: the same
engine, the same rendering, the same jails.

    python benchmarks/base_model.py models/smollm2-135m-instruct --temperatures 0.5 0.6 0.8
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from headrace.actor.chat import ChatFormat
from headrace.actor.engine import Engine
from headrace.actor.episode import EpisodeResult, Limits, run_episode
from headrace.broker.host_weights import HostWeights
from headrace.broker.records import ROLE_PROMPT, ROLE_SAMPLED
from headrace.clock import SystemClock
from headrace.environments.protocol import Domain, EnvironmentFailure
from headrace.environments.registry import get_domain

LIMITS = Limits(max_new_tokens=256, max_model_len=512, deadline_s=300.0)
HEADER = (
    "| domain | level | temperature | success | first turn | informative groups | score | turns |"
    " prompt tokens | sampled tokens | jailed CPU s | failures |"
)


def mean(values: list[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def tokens_of(result: EpisodeResult, role: int) -> int:
    """Number of an episode's tokens that have a role."""
    return sum(span.end - span.start for span in result.roles if span.value == role)


def row(
    domain: str, level: int, temperature: float, groups: list[list[EpisodeResult]], failures: int
) -> str:
    """One line of the table."""
    samples = [sample for group in groups for sample in group]
    spread = [len({sample.verdict.score for sample in group}) > 1 for group in groups]
    cells = [
        domain,
        str(level),
        f"{temperature:g}",
        f"{mean([sample.verdict.success for sample in samples]):.3f}",
        f"{mean([s.verdict.success and len(s.turns) == 1 for s in samples]):.3f}",
        f"{mean([float(flag) for flag in spread]):.2f}",
        f"{mean([sample.verdict.score for sample in samples]):.3f}",
        f"{mean([float(len(sample.turns)) for sample in samples]):.2f}",
        f"{mean([float(tokens_of(sample, ROLE_PROMPT)) for sample in samples]):.0f}",
        f"{mean([float(tokens_of(sample, ROLE_SAMPLED)) for sample in samples]):.1f}",
        f"{mean([sum(e.cpu_s for e in sample.executions) for sample in samples]):.3f}",
        str(failures),
    ]
    return f"| {' | '.join(cells)} |"


async def measure(
    engine: Engine, chat: ChatFormat, domain: Domain, level: int, args: argparse.Namespace
) -> None:
    """Run groups of one domain and level at every temperature and print their rows."""
    gate = asyncio.Semaphore(args.in_flight)
    for temperature in args.temperatures:
        failures = 0

        async def sample(index: int, number: int, at: float = temperature) -> EpisodeResult | None:
            nonlocal failures
            async with gate:
                try:
                    return await run_episode(
                        engine,
                        chat,
                        domain,
                        domain.task(index, split=args.split, level=level),
                        seed=index * args.group_size + number,
                        temperature=at,
                        limits=LIMITS,
                        request_id=f"{domain.id}.{level}.{at}.{index}.{number}",
                        clock=SystemClock(),
                    )
                except EnvironmentFailure as failure:
                    failures += 1
                    print(f"failed: {failure}", file=sys.stderr)
                    return None

        async def group(index: int) -> list[EpisodeResult]:
            runs = [sample(index, number) for number in range(args.group_size)]
            return [result for result in await asyncio.gather(*runs) if result is not None]

        groups = await asyncio.gather(*[group(index) for index in range(args.groups)])
        print(row(domain.id, level, temperature, list(groups), failures), flush=True)
        for result in [results[0] for results in groups if results][: args.show]:
            text = chat.action(result.tokens)
            print(f"    {text!r} {result.verdict.kind} {result.verdict.evidence}", file=sys.stderr)


async def main(args: argparse.Namespace) -> None:
    """Start the engine on the model's own weights and measure."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    chat = ChatFormat(tokenizer)
    engine = await Engine.start(
        args.model,
        dtype="bfloat16",
        max_model_len=LIMITS.max_model_len,
        kv_cache_bytes=256 << 20,
        threads=1,
    )
    try:
        weights = HostWeights.of(load_file(args.model / "model.safetensors"))
        await engine.apply(weights, version=0)
        begun = time.monotonic()
        print(HEADER)
        print("|" + " --- |" * HEADER.count(" | ") + " --- |")
        for name in args.domains:
            domain = get_domain(name)
            for level in args.levels or range(domain.levels):
                await measure(engine, chat, domain, level, args)
        print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    finally:
        await engine.close()


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
    parser.add_argument("--in-flight", type=int, default=48, help="episodes at the same time")
    parser.add_argument("--show", type=int, default=0, help="episodes to print per row")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parse()))
