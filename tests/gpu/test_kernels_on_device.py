"""On one CUDA device: `pytest tests/gpu -m gpu`. Imports headrace.kernels and nothing else."""

import itertools

import pytest
import torch

from headrace.kernels import Blocks, linear_logprob, packed_attention

pytestmark = pytest.mark.gpu

LIMITS = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
SPARSE = Blocks(64, torch.tensor([[-1], [0], [0], [-1], [0], [-1]]))


@pytest.fixture(scope="module", autouse=True)
def device():
    assert torch.cuda.is_available(), "these tests were asked for and there is no CUDA device"


def error(value, truth):
    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).norm() / truth.norm().clamp(min=1.0))


def inputs(rows, query_heads, key_heads, head_dim, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(rows, heads, head_dim, generator=generator, device="cuda").to(dtype)
        for heads in (query_heads, key_heads, key_heads, query_heads)
    ]


def run(tensors, lengths, backend, **options):
    q, k, v, grad = tensors
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    out = packed_attention(leaves[0], leaves[1], leaves[2], cu_seqlens, backend=backend, **options)
    return (out, *torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 200, 256])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([300, 65, 0, 129, 1], {"prefix_of": torch.tensor([-1, 0, 0, 0, -1])}),
        ([300, 140], {"window": 70}),
        ([180, 100, 30], {"blocks": SPARSE, "prefix_of": torch.tensor([-1, 0, -1])}),
    ],
)
def test_attention_equals_float64_and_repeats_to_the_bit(lengths, options, head_dim, dtype):
    tensors = inputs(sum(lengths) + 3, 6, 2, head_dim, dtype)
    first = run(tensors, lengths, "triton", **options)
    again = run(tensors, lengths, "triton", **options)
    truth = run([t.double() for t in tensors], lengths, "reference", **options)
    for one, two, true in zip(first, again, truth, strict=True):
        assert torch.equal(one, two)
        assert error(one, true) < LIMITS[dtype]


def test_packing_order_and_poisoned_neighbours_change_no_bit():
    tensors = inputs(900, 6, 2, 64, torch.bfloat16)
    before = run(tensors, [300, 400, 200], "triton")
    poisoned = [t.clone() for t in tensors]
    for t in poisoned:
        t[:300] = float("nan")
        t[700:] = float("inf")
    after = run(poisoned, [300, 400, 200], "triton")
    order = torch.tensor([*range(300, 900), *range(300)], device="cuda")
    moved = run([t[order] for t in tensors], [400, 200, 300], "triton")
    for a, b, c in zip(before, after, moved, strict=True):
        assert torch.equal(a[300:700], b[300:700])
        assert torch.equal(a[order], c)


def test_addresses_beyond_int32_are_reached():
    rows, apart = 129, 2**31 // 128
    memory = torch.empty(2**31 + 2**23, dtype=torch.bfloat16, device="cuda")
    near = inputs(rows, 1, 1, 16, torch.bfloat16)
    far = [memory.as_strided((rows, 1, 16), (apart, 16, 1), 64 * place) for place in range(4)]
    for tensor, values in zip(far, near, strict=True):
        tensor.copy_(values)
    truth = run(near, [rows], "triton")
    for value, true in zip(run(far, [rows], "triton"), truth, strict=True):
        assert torch.equal(value, true)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "classes"), [(257, 576, 49152), (33, 80, 1003), (1, 5, 3)]
)
def test_the_head_equals_float64_and_repeats_to_the_bit(rows, width, classes, bias, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(classes, width, generator=generator, device="cuda") / width**0.5).to(
        dtype
    )
    shift = torch.randn(classes, generator=generator, device="cuda").to(dtype)
    targets = torch.randint(0, classes, (rows,), generator=generator, device="cuda")
    targets[1::5] = -100

    def results(backend, wide):
        leaves = [t.to(wide).detach().requires_grad_() for t in (hidden, weight, shift)]
        out = linear_logprob(
            leaves[0],
            leaves[1],
            targets,
            bias=leaves[2] if bias else None,
            temperature=0.8,
            backend=backend,
        )
        loss = out.logprob.sum() + 0.1 * out.entropy.sum()
        return (*out, *torch.autograd.grad(loss, leaves if bias else leaves[:2]))

    first, again = results("triton", dtype), results("triton", dtype)
    for one, two, true in zip(first, again, results("reference", torch.float64), strict=True):
        assert torch.equal(one, two)
        assert error(one, true) < LIMITS[dtype]
