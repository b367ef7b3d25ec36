"""Attention and head on this CPU against PyTorch's ways, and their costs on a GPU on paper.

    headrace bench kernels [--only paper attention head] [--threads 1] [--repeats 5] [--rows 16384]

Every measurement runs in a process of its own. Rows go to standard output and to
benchmarks/results/kernels.jsonl with commit, machine and load average: on a busy machine wall times
mean little, so CPU seconds are stored beside them. Paper rows are arithmetic and say so.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from headrace.benchrows import store
from headrace.kernels import linear_logprob, packed_attention
from headrace.kernels.attention.costs import Segment, Shape, attention_limit, cost
from headrace.kernels.attention.launch import TABLE

HEADS, KEY_HEADS, HEAD_DIM, WIDTH = 9, 3, 64, 576
MIXED = [1200, 900, 700, 500, 400, 250, 100, 46]
# Two groups of eight short completions after a shared prompt of 100 tokens.
GROUPS = [100, 35, 20, 60, 10, 44, 30, 52, 25] * 2
PREFIX_OF = [-1, *[0] * 8, -1, *[9] * 8]
# From the published configurations: parameters in products, layers, query heads times head_dim.
MODELS = {"SmolLM2-135M": (134_500_000, 30, 576), "Qwen2.5-7B": (7_070_000_000, 28, 3584)}
# Bytes per logit at the peak of forward and backward with a float32 softmax, at least.
LOGITS_BYTES = 14
RESERVE = 3 * 2**30
Row = dict[str, Any]


def paper() -> Iterator[Row]:
    """FLOPs, bytes and tiles of one layer from 4k to 1M tokens, and Amdahl's limit by model."""
    launches, shape = TABLE["sm_90", torch.bfloat16][HEAD_DIM], Shape(HEADS, KEY_HEADS, HEAD_DIM)
    for tokens in (2**power for power in range(12, 21, 2)):
        prompt, completion = tokens // 2, tokens // 16
        packs: dict[str, tuple[list[Segment], int | None, tuple[int, int] | None]] = {
            "dense": ([Segment(tokens)], None, None),
            "replicated prompts": ([Segment(prompt + completion, 8)], None, None),
            "shared prefix": (
                [Segment(prompt), Segment(completion, 8, prefix=prompt)],
                None,
                None,
            ),
            "window 4096": ([Segment(tokens)], 4096, None),
            "32 blocks of 128": ([Segment(tokens)], None, (128, 32)),
        }
        for name, (segments, window, blocks) in packs.items():
            planned = cost(segments, shape, launches, window, blocks)
            yield {
                "question": "cost on paper",
                "mask": name,
                "tokens": sum(s.length * s.count for s in segments),
                "tiles": planned.forward_tiles,
                "tile_efficiency": round(planned.efficiency, 4),
                "forward_gflop": round(planned.forward_flops / 1e9, 1),
                "backward_gflop": round(planned.backward_flops / 1e9, 1),
                "gbyte_uncached": round(planned.bytes_moved / 1e9, 2),
            }
    for model, (parameters, layers, width) in MODELS.items():
        for tokens in (4096, 32768, 131072, 2**20):
            limit = attention_limit(parameters, layers, width, tokens)
            yield {
                "question": "speed-up if attention were free, on paper",
                "model": model,
                "tokens": tokens,
                "limit": round(limit, 2),
            }


def attention_case(library: str, dtype: torch.dtype) -> Callable[[bool], object]:
    """Forward (False) or forward and backward (True) of one way to compute a pack."""
    shared = library.startswith("groups")
    lengths = GROUPS if shared else MIXED
    if library == "groups, prompts replicated":
        lengths = [100 + n for start in (1, 10) for n in GROUPS[start : start + 8]]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(int(cu_seqlens[-1]), heads, HEAD_DIM, generator=generator).to(dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    prefix_of = torch.tensor(PREFIX_OF) if library == "groups, shared prefix" else None
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "padded sdpa": lambda: _padded(q, k, v, cu_seqlens),
        "dense mask": lambda: _dense(q, k, v, cu_seqlens),
        "sdpa per sequence": lambda: _per_sequence(q, k, v, cu_seqlens),
        "groups, prompts replicated": lambda: _per_sequence(q, k, v, cu_seqlens),
    }
    function = ways.get(library, lambda: packed_attention(q, k, v, cu_seqlens, prefix_of=prefix_of))

    def run(backward: bool) -> object:
        if backward:
            return torch.autograd.grad(function(), (q, k, v), grad)
        with torch.no_grad():
            return function()

    return run


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def _per_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    parts = []
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        one_q, one_k, one_v = (t[start:stop].transpose(0, 1)[None] for t in (q, k, v))
        parts.append(_sdpa(one_q, one_k, one_v, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts)


def _padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    cuts = cu_seqlens.diff().tolist()
    many_q, many_k, many_v = (
        torch.nn.utils.rnn.pad_sequence(list(torch.split(t, cuts)), batch_first=True).transpose(
            1, 2
        )
        for t in (q, k, v)
    )
    out = _sdpa(many_q, many_k, many_v, is_causal=True).transpose(1, 2)
    return torch.cat([one[:length] for one, length in zip(out, cuts, strict=True)])


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    rows = torch.arange(q.shape[0])
    segment = torch.bucketize(rows, cu_seqlens[1:], right=True)
    mask = (segment[:, None] == segment[None, :]) & (rows[:, None] >= rows[None, :])
    one_q, one_k, one_v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return _sdpa(one_q, one_k, one_v, attn_mask=mask)[0].transpose(0, 1)


def head_case(
    library: str, rows: int, classes: int, dtype: torch.dtype
) -> Callable[[bool], object]:
    """Forward and backward of one way to compute the head."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(classes, WIDTH, generator=generator, dtype=dtype)
    weight = weight.div_(math.sqrt(WIDTH)).requires_grad_()
    targets = torch.randint(0, classes, (rows,), generator=generator)

    def logits() -> torch.Tensor:
        logits = (hidden @ weight.T).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    def chunked() -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        return torch.nn.functional.linear_cross_entropy(
            hidden, weight, targets, reduction="sum", options=options
        )

    def without_logits() -> torch.Tensor:
        result = linear_logprob(hidden, weight, targets)
        total = result.logprob.sum()
        return total + result.entropy.sum() if library.endswith("entropy") else total

    function = {"logits": logits, "linear_cross_entropy, chunked": chunked}.get(
        library, without_logits
    )

    def run(backward: bool) -> object:
        del backward
        return torch.autograd.grad(function(), (hidden, weight))

    return run


def child(arguments: argparse.Namespace) -> Row:
    """Measure one case in this process."""
    torch.set_num_threads(arguments.threads)
    question, library = arguments.case[0], arguments.case[1]
    load = os.getloadavg()[0]
    if question == "attention":
        dtype = getattr(torch, arguments.case[2])
        run = attention_case(library, dtype)
        forward = _fastest(run, False, arguments.repeats)
        both = _fastest(run, True, arguments.repeats)
        measured = {
            "dtype": arguments.case[2],
            "forward_wall_ms": round(forward[0] * 1e3, 1),
            "forward_cpu_ms": round(forward[1] * 1e3, 1),
            "both_wall_ms": round(both[0] * 1e3, 1),
            "both_cpu_ms": round(both[1] * 1e3, 1),
        }
    else:
        rows, classes = int(arguments.case[3]), int(arguments.case[4])
        run = head_case(library, rows, classes, getattr(torch, arguments.case[2]))
        before = _restart_peak()
        both = _fastest(run, True, 1, warm=False)
        measured = {
            "dtype": arguments.case[2],
            "rows": rows,
            "classes": classes,
            "width": WIDTH,
            "peak_mib_above_inputs": round((_memory("VmHWM") - before) / 2**20),
            "both_wall_s": round(both[0], 2),
            "both_cpu_s": round(both[1], 2),
        }
    return (
        {"question": question, "library": library, "threads": arguments.threads}
        | measured
        | {"load_before_after": [round(load, 2), round(os.getloadavg()[0], 2)]}
    )


def _fastest(
    run: Callable[[bool], object], backward: bool, repeats: int, warm: bool = True
) -> tuple[float, float]:
    """Smallest wall and CPU seconds of a call."""
    if warm:
        run(backward)
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        run(backward)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def _restart_peak() -> int:
    """Let the kernel's record of peak memory start from now; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measured_cases(only: list[str], rows: int) -> Iterator[tuple[str, ...]]:
    """Arguments of every measurement: question, library, dtype, sizes."""
    if "attention" in only:
        packs = ("headrace", "sdpa per sequence", "padded sdpa", "dense mask")
        groups = ("groups, shared prefix", "groups, prompts replicated")
        for dtype, library in itertools.product(("float32", "bfloat16"), packs + groups):
            yield ("attention", library, dtype)
    if "head" in only:
        libraries = (
            "headrace",
            "headrace with entropy",
            "logits",
            "linear_cross_entropy, chunked",
        )
        for classes, dtype, library in itertools.product(
            (49152, 151936), ("bfloat16", "float32"), libraries
        ):
            yield ("head", library, dtype, str(rows), str(classes))


def measure(case: tuple[str, ...], options: argparse.Namespace) -> Row:
    """Run one case in a fresh process; what would not fit into memory is not started."""
    if case[1] == "logits":
        needed, available = int(case[3]) * int(case[4]) * LOGITS_BYTES, _available()
        if needed + RESERVE > available:
            return {
                "question": case[0],
                "library": case[1],
                "dtype": case[2],
                "rows": int(case[3]),
                "classes": int(case[4]),
                "not_run": f"needs about {needed / 2**30:.1f} GiB, "
                f"{available / 2**30:.1f} GiB are available",
            }
    flags = ["--threads", str(options.threads), "--repeats", str(options.repeats)]
    command = [sys.executable, "-P", __file__, *flags, "--case", *case]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=7200)
    row: Row = json.loads(done.stdout)
    return row


def _available() -> int:
    """Bytes that can be used without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def main(argv: list[str] | None = None) -> int:
    """Print and store rows."""
    parser = argparse.ArgumentParser(prog="headrace bench kernels", description=__doc__)
    questions = ("paper", "attention", "head")
    parser.add_argument("--only", nargs="+", choices=questions, default=list(questions))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16384, help="rows of the head")
    parser.add_argument("--libraries", nargs="+", help="measure these alone")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        print(json.dumps(child(options)))
        return 0
    if "paper" in options.only:
        for row in paper():
            store(__file__, row | {"measured": False})
    for case in measured_cases(options.only, options.rows):
        if case[1] not in (options.libraries or case) or case[2] not in options.dtypes:
            continue
        row = measure(case, options)
        store(__file__, row | {"measured": "not_run" not in row, "torch": torch.__version__})
    return 0


if __name__ == "__main__":
    sys.exit(main())
