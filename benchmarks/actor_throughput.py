"""How many tokens a second an actor's engine generates, against plain vLLM on the same prompts.

Both engines live at the same time and take turns, so that a busy machine slows both alike; the
figures per CPU second (client and engine process together) do not depend on it. Appends one row to
benchmarks/results/actor_throughput.jsonl.

    python benchmarks/actor_throughput.py models/smollm2-135m-instruct
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.actor.engine import Engine
from headrace.benchrows import store
from headrace.broker.host_weights import HostWeights

KV_CACHE_BYTES = 256 << 20
MAX_MODEL_LEN = 512


def engines_of_this_process() -> list[int]:
    """Process ids of vLLM's engine cores, the oldest first."""
    lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    pids = sorted(int(pid) for pid in " ".join(lists).split())
    return [pid for pid in pids if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]


def cpu_seconds(pid: int) -> float:
    """CPU time of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_plain(model: Path) -> Any:
    """The offline interface of vLLM with the settings of the actor's engine."""
    from vllm import LLM

    return LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        block_size=32,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        distributed_executor_backend="headrace.actor.executor.SingleProcessExecutor",
    )


def plain_turn(llm: Any, prompts: list[list[int]], new_tokens: int) -> int:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=new_tokens,
            temperature=1.0,
            seed=seed,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        for seed in range(len(prompts))
    ]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


async def actor_turn(engine: Engine, prompts: list[list[int]], new_tokens: int, turn: int) -> int:
    made = await asyncio.gather(
        *(
            engine.generate(
                prompt,
                max_new_tokens=new_tokens,
                temperature=1.0,
                seed=seed,
                stop_token_ids=[],
                request_id=f"{turn}.{seed}",
            )
            for seed, prompt in enumerate(prompts)
        )
    )
    return sum(len(generation.tokens) for generation in made)


async def timed(turn: Callable[[], Awaitable[int]], pid: int) -> dict[str, float]:
    cpu = time.process_time() + cpu_seconds(pid)
    started = time.perf_counter()
    tokens = await turn()
    wall = time.perf_counter() - started
    cpu = time.process_time() + cpu_seconds(pid) - cpu
    return {"per_s": tokens / wall, "per_cpu_s": tokens / cpu}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    engine = await Engine.start(
        arguments.model,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=KV_CACHE_BYTES,
        threads=1,
    )
    start_s = time.perf_counter() - started
    [actor_pid] = engines_of_this_process()
    weights = HostWeights.of(load_file(arguments.model / "model.safetensors"))
    report = await engine.apply(weights, version=0)
    plain = await asyncio.to_thread(start_plain, arguments.model)
    [plain_pid] = [pid for pid in engines_of_this_process() if pid != actor_pid]
    generator = torch.Generator().manual_seed(0)
    rounds: dict[str, list[dict[str, float]]] = {"actor": [], "plain": []}
    for turn in range(arguments.rounds + 1):
        # Fresh prompts every round: none is answered from the prefix cache.
        prompts = torch.randint(3, 40000, (arguments.requests, 48), generator=generator).tolist()

        async def through_actor(prompts: Any = prompts, turn: int = turn) -> int:
            return await actor_turn(engine, prompts, arguments.new_tokens, turn)

        async def through_plain(prompts: Any = prompts) -> int:
            return plain_turn(plain, prompts, arguments.new_tokens)

        actor = await timed(through_actor, actor_pid)
        other = await timed(through_plain, plain_pid)
        if turn:  # the first warms both up
            rounds["actor"].append(actor)
            rounds["plain"].append(other)
    await engine.close()
    ratios = {
        key: statistics.median(
            a[key] / b[key] for a, b in zip(rounds["actor"], rounds["plain"], strict=True)
        )
        for key in ("per_s", "per_cpu_s")
    }
    return {
        "requests": arguments.requests,
        "new_tokens": arguments.new_tokens,
        "rounds": arguments.rounds,
        "engine_start_s": round(start_s, 1),
        "apply_s": round(report.apply_s, 3),
        "pause_s": round(report.pause_s, 3),
        **{
            f"{name}_tokens_{key}": round(statistics.median(item[key] for item in items), 1)
            for name, items in rounds.items()
            for key in ("per_s", "per_cpu_s")
        },
        **{f"ratio_{key}": round(value, 3) for key, value in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    store(__file__, {"model": arguments.model.name, **asyncio.run(measure(arguments))})


if __name__ == "__main__":
    main()
