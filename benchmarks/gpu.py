"""The kernels on one GPU: correctness first, then speed against the measured matrix-multiply rate.

Imports nothing of headrace but the kernels, so that it runs where neither vLLM nor NATS is. A row
per question goes to standard output and to benchmarks/results/gpu.jsonl. Without a CUDA device it
says so and stores nothing.

    python -P benchmarks/gpu.py [--minutes 8]
"""

import argparse
import functools
import importlib.util
import itertools
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from headrace.kernels import linear_logprob, packed_attention

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
Row = dict[str, Any]


def boundaries(lengths: list[int]) -> torch.Tensor:
    """`cu_seqlens` of consecutive segments."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


def seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a call on the device, after three warm-up calls."""
    for _ in range(3):
        function()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def tensors(
    rows: int, query_heads: int, key_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k, v that require gradients, and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(rows, heads, head_dim, generator=generator, device="cuda").to(dtype)
        for heads in (query_heads, key_heads, key_heads, query_heads)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative error of a tensor."""
    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).norm() / truth.norm().clamp(min=1.0))


def attention_results(
    backend: str,
    tensors: tuple[torch.Tensor, ...],
    lengths: list[int],
    prefix_of: torch.Tensor,
    window: int | None,
) -> list[torch.Tensor]:
    """The output and the gradients of q, k, v."""
    q, k, v, grad = tensors
    out = packed_attention(
        q, k, v, boundaries(lengths), prefix_of=prefix_of, window=window, backend=backend
    )
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def attention_correctness() -> Iterator[Row]:
    """Kernels against float64 for every padded head_dim and dtype; two runs must be one."""
    lengths, prefix_of = [300, 65, 0, 129, 1, 200], torch.tensor([-1, 0, 0, 0, -1, -1])
    for dtype, head_dim, window in itertools.product(
        LIMITS, (16, 32, 64, 80, 128, 256), (None, 70)
    ):
        given = tensors(sum(lengths) + 3, 6, 2, head_dim, dtype)
        wide = tuple(t.detach().double().requires_grad_() for t in given)
        first = attention_results("triton", given, lengths, prefix_of, window)
        second = attention_results("triton", given, lengths, prefix_of, window)
        truth = attention_results("reference", wide, lengths, prefix_of, window)
        row = {"question": "attention equals float64", "head_dim": head_dim, "window": window}
        yield row | verdict(dtype, first, second, truth)


def head_results(
    backend: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """Log-probability, entropy and the gradients of hidden and weight."""
    hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
    out = linear_logprob(hidden, weight, targets, temperature=0.8, backend=backend)
    loss = out.logprob.sum() + 0.1 * out.entropy.sum()
    return [*out, *torch.autograd.grad(loss, (hidden, weight))]


def head_correctness() -> Iterator[Row]:
    """The head against float64; two runs must be one."""
    shapes = ((257, 576, 49152), (33, 80, 1003))
    for dtype, (rows, width, classes) in itertools.product(LIMITS, shapes):
        hidden, weight, targets = head_tensors(rows, width, classes, dtype)
        targets[::5] = -100
        first = head_results("triton", hidden, weight, targets)
        second = head_results("triton", hidden, weight, targets)
        truth = head_results("reference", hidden.double(), weight.double(), targets)
        row = {"question": "head equals float64", "shape": [rows, width, classes]}
        yield row | verdict(dtype, first, second, truth)


def head_tensors(
    rows: int, width: int, classes: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random hidden, weight and targets."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, device="cuda")
    weight = torch.randn(classes, width, generator=generator, device="cuda") / math.sqrt(width)
    targets = torch.randint(0, classes, (rows,), generator=generator, device="cuda")
    return hidden.to(dtype), weight.to(dtype), targets


def verdict(
    dtype: torch.dtype,
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    truth: list[torch.Tensor],
) -> Row:
    """Errors of the first run, and whether they are small and the second run is the same."""
    errors = [error(a, b) for a, b in zip(first, truth, strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return {
        "dtype": str(dtype),
        "errors": errors,
        "repeats": same,
        "ok": max(errors) < LIMITS[dtype] and same,
    }


def matmul_rate(dtype: torch.dtype) -> float:
    """Operations per second of a large square product: what the fractions below are of."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    return 2 * 8192**3 / seconds(lambda: a @ b)


def attention_speed(rate: float) -> Iterator[Row]:
    """Forward and backward on single sequences and on packs, against the libraries' kernels.

    Operations counted: 4 per allowed pair, head and column forward, 2.5 times that backward.
    """
    packs = {
        "one of 16384": [16384],
        "sixteen of 1024": [1024] * 16,
        "mixed": [6000, 4000, 3000, 1500, 900, 500, 300, 184],
    }
    for (heads, key_heads, head_dim), (name, lengths) in itertools.product(
        ((16, 16, 128), (28, 4, 128), (9, 3, 64)), packs.items()
    ):
        q, k, v, grad = tensors(sum(lengths), heads, key_heads, head_dim, torch.bfloat16)
        forward = 4 * heads * head_dim * sum(n * (n + 1) // 2 for n in lengths)
        for library, function in attention_libraries(q, k, v, lengths).items():
            taken = seconds(function)
            backward = functools.partial(
                torch.autograd.grad, function(), (q, k, v), grad, retain_graph=True
            )
            both = seconds(backward)
            yield {
                "question": "attention speed",
                "library": library,
                "heads": [heads, key_heads, head_dim],
                "pack": name,
                "forward_tflops": forward / taken / 1e12,
                "forward_of_matmul": forward / taken / rate,
                "backward_tflops": 2.5 * forward / both / 1e12,
                "backward_of_matmul": 2.5 * forward / both / rate,
            }


def attention_libraries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]
) -> dict[str, Callable[[], torch.Tensor]]:
    """The same attention by headrace, by PyTorch per sequence, and by flash-attention if there."""
    cu_seqlens = boundaries(lengths)

    def by_sequence() -> torch.Tensor:
        parts = []
        for a, b in itertools.pairwise(cu_seqlens.tolist()):
            one_q, one_k, one_v = (t[a:b].transpose(0, 1)[None] for t in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                one_q, one_k, one_v, is_causal=True, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    libraries = {
        "headrace": lambda: packed_attention(q, k, v, cu_seqlens, backend="triton"),
        "torch sdpa per sequence": by_sequence,
    }
    if importlib.util.find_spec("flash_attn") is None:
        return libraries
    flash_attn_varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func
    on_device, longest = cu_seqlens.int().cuda(), max(lengths)
    libraries["flash-attention varlen"] = lambda: flash_attn_varlen_func(
        q, k, v, on_device, on_device, longest, longest, causal=True, deterministic=True
    )
    return libraries


def our_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of log-probabilities without logits."""
    return linear_logprob(hidden, weight, targets, backend="triton").logprob.sum()


def logits_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of log-probabilities from the whole logits matrix."""
    logits = (hidden @ weight.T).float()
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def head_step(
    loss: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
) -> object:
    """Forward and backward."""
    return torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))


def head_speed(rate: float) -> Iterator[Row]:
    """The head against full logits: time and peak memory of forward and backward."""
    for rows, width, classes in ((16384, 576, 49152), (16384, 3584, 151936)):
        hidden, weight, targets = head_tensors(rows, width, classes, torch.bfloat16)
        hidden.requires_grad_(), weight.requires_grad_()
        for library, loss in (("headrace", our_loss), ("logits", logits_loss)):
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            row = {"question": "head speed", "library": library, "shape": [rows, width, classes]}
            try:
                taken = seconds(functools.partial(head_step, loss, hidden, weight, targets), 5)
            except torch.cuda.OutOfMemoryError:
                yield row | {"out_of_memory": True}
                continue
            yield row | {
                "seconds": taken,
                "peak_bytes": torch.cuda.max_memory_allocated() - base,
                "of_matmul": 6 * rows * width * classes / taken / rate,
            }


def main(argv: list[str] | None = None) -> int:
    """Print and store rows; 1 when something is wrong, 2 without a device."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="stop starting rows after this")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    end = time.monotonic() + options.minutes * 60
    about = {
        "commit": _commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    for row in itertools.chain(attention_correctness(), head_correctness()):
        _store(row | about)
        if not row["ok"]:
            print("wrong results: no speed is measured", file=sys.stderr)
            return 1
    rate = matmul_rate(torch.bfloat16)
    _store({"question": "matmul rate", "tflops": rate / 1e12} | about)
    for row in itertools.chain(attention_speed(rate), head_speed(rate)):
        _store(row | about)
        if time.monotonic() > end:
            print("out of time: the remaining rows were not measured", file=sys.stderr)
            break
    return 0


def _store(row: Row) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(line + "\n")


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
