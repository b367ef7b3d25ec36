"""How fast one training step is, against the matrix products that it cannot avoid.

The floor is 6 FLOPs per parameter of the linear layers and token, and 6 per parameter of the output
head and trained token, at the rate that plain products of this model's shapes reach in the same
process. Attention is not in the floor. Seconds are processor seconds of this process, so that other
work on the machine disturbs little; wall time is stored beside them. Batches are synthetic; their
log-probabilities mean nothing, their lengths are those of short tasks.

    headrace bench trainer_step models/smollm2-135m-instruct --groups 10 --budgets 1024 4096
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from headrace.benchrows import store
from headrace.broker.records import ROLE_PROMPT, ROLE_SAMPLED, Array, Span, Trajectory, Verdict
from headrace.config import Learner
from headrace.learner.trainer import Trainer, TrainGroup

PROMPT = (60, 151)
COMPLETION = (8, 61)
TEMPERATURE = 0.6


def trajectory(
    rng: np.random.Generator, group: int, index: int, prompt: np.ndarray, vocabulary: int
) -> Trajectory:
    """A sample of random tokens after a prompt, scored 0 or 1 in turn."""
    length = int(rng.integers(*COMPLETION))
    start, end = len(prompt), len(prompt) + length
    score = float(index % 2)
    return Trajectory(
        group=group,
        index=index,
        attempt=0,
        actor="benchmark",
        lineage=1,
        tokens=Array.of("int32", np.concatenate([prompt, rng.integers(0, vocabulary, length)])),
        roles=[Span(ROLE_PROMPT, 0, start), Span(ROLE_SAMPLED, start, end)],
        versions=[Span(0, start, end)],
        logprobs=Array.of("float32", -3.0 * rng.random(length)),
        temperature=TEMPERATURE,
        verdict=Verdict(score=score, success=score > 0, step_scores=[score], checks=[]),
        turns=[],
        executions=[],
        queue_s=0.0,
        wall_s=0.0,
    )


def batch(seed: int, groups: int, size: int, vocabulary: int) -> list[TrainGroup]:
    """Groups of short tasks."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = rng.integers(0, vocabulary, int(rng.integers(*PROMPT)))
        samples = [trajectory(rng, group, i, prompt, vocabulary) for i in range(size)]
        made.append(TrainGroup(group, samples))
    return made


def product_rate(hidden: int, inner: int, dtype: torch.dtype) -> float:
    """FLOPs per processor second of the three products of a layer's widest projection."""
    rows = 2048
    x = torch.randn(rows, hidden).to(dtype)
    weight = torch.randn(inner, hidden).to(dtype)
    gradient = torch.randn(rows, inner).to(dtype)
    best = float("inf")
    for _ in range(6):
        start = time.process_time()
        torch.nn.functional.linear(x, weight)
        gradient @ weight
        gradient.T @ x
        best = min(best, time.process_time() - start)
    return 6.0 * rows * hidden * inner / best


def measure(args: argparse.Namespace, budget: int, share: bool) -> dict[str, object]:
    """Best of the steps after a first one that warms caches up."""
    config = Learner(token_budget=budget, share_prompts=share, threads=1)
    trainer = Trainer.load(args.model, config, temperature=TEMPERATURE, dtype=args.dtype)
    weights = trainer.weights()
    vocabulary, hidden = weights["model.embed_tokens.weight"].shape
    inner = weights["model.layers.0.mlp.up_proj.weight"].shape[0]
    linear = sum(t.numel() for n, t in weights.items() if t.dim() == 2 and "layers" in n)
    rate = product_rate(hidden, inner, getattr(torch, args.dtype))
    rows = []
    for seed in range(args.steps + 1):
        work = batch(seed, args.groups, args.group_size, vocabulary)
        start = time.process_time()
        result = trainer.train(work)
        cpu = time.process_time() - start
        forward, trained = result.metrics["forward_tokens"], result.trained_tokens
        floor = 6.0 * (linear * forward + hidden * vocabulary * trained) / rate
        rows.append((floor / cpu, cpu, result))
    share_of_floor, cpu, result = max(rows[1:], key=lambda row: row[0])
    return {
        "token_budget": budget,
        "share_prompts": share,
        "trained_tokens": result.trained_tokens,
        "forward_tokens": result.metrics["forward_tokens"],
        "cpu_s": round(cpu, 2),
        "wall_s": {part: round(value, 2) for part, value in result.seconds.items()},
        "trained_tokens_per_cpu_s": round(result.trained_tokens / cpu, 1),
        "product_gflops": round(rate / 1e9, 1),
        "share_of_floor": round(share_of_floor, 3),
    }


def parse() -> argparse.Namespace:
    """Arguments of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder of a Llama")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each setting")
    parser.add_argument("--budgets", nargs="+", type=int, default=[4096])
    parser.add_argument("--unshared", action="store_true", help="measure unshared prompts too")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Print and store one row a setting."""
    for budget in args.budgets:
        for share in (True, False) if args.unshared else (True,):
            about = {"model": args.model.name, "dtype": args.dtype, "torch": torch.__version__}
            store(__file__, about | {"threads": 1} | measure(args, budget, share))


if __name__ == "__main__":
    main(parse())
