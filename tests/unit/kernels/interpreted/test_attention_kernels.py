import pytest
import torch

from headrace.kernels import Blocks, packed_attention
from tests.unit.kernels.cases import attention_inputs, boundaries, relative_error

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SPARSE = Blocks(32, torch.tensor([[0, -1], [0, -1], [1, 0], [0, 0], [0, -1]]))


def run(inputs, lengths, backend, dtype=torch.float32, **options):
    """The output and the gradients of q, k, v."""
    q, k, v, grad = (tensor.to(dtype).detach() for tensor in inputs)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = packed_attention(q, k, v, boundaries(lengths), backend=backend, **options)
    return (out, *torch.autograd.grad(out, (q, k, v), grad))


def check(inputs, lengths, dtype, **options):
    rounded = tuple(t.to(dtype).double() for t in inputs)
    truth = run(rounded, lengths, "reference", torch.float64, **options)
    values = run(inputs, lengths, "triton", dtype, **options)
    for name, value, true in zip(("o", "dq", "dk", "dv"), values, truth, strict=True):
        assert relative_error(value, true) < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "head_dim", "lengths", "options"),
    [
        ((6, 2), 16, [5, 1, 0, 17, 50], {}),
        ((3, 1), 80, [20, 5, 0, 17, 3], {"prefix_of": torch.tensor([-1, 0, 0, 0, -1])}),
        ((2, 2), 24, [33, 70, 12], {"prefix_of": torch.tensor([-1, 0, 0]), "window": 9}),
        ((4, 1), 16, [90, 40, 0], {"blocks": SPARSE, "window": 50, "scale": 0.3}),
        ((2, 1), 256, [18, 7], {"prefix_of": torch.tensor([-1, 0])}),
    ],
)
def test_kernels_equal_float64_with_every_gradient(heads, head_dim, lengths, options, dtype):
    check(
        attention_inputs(sum(lengths) + 3, heads[0], heads[1], head_dim), lengths, dtype, **options
    )


def test_bfloat16_is_right_where_the_interpreter_alone_would_compute_on_bits():
    lengths = [20, 5, 17]
    check(
        attention_inputs(42, 4, 2, 16),
        lengths,
        torch.bfloat16,
        prefix_of=torch.tensor([-1, 0, 0]),
    )


def test_a_prefix_may_lie_anywhere_and_its_completions_apart():
    lengths = [7, 40, 0, 12, 9, 21]
    prefix_of = torch.tensor([1, -1, 1, -1, 3, 1])
    check(attention_inputs(89, 2, 1, 16), lengths, torch.float32, prefix_of=prefix_of)


def test_blocks_with_a_prefix_are_sparse_within_the_segment_only():
    lengths = [40, 70, 33]
    chosen = torch.tensor([[-1], [0], [-1], [-1], [1], [-1], [0]])
    check(
        attention_inputs(143, 2, 1, 16),
        lengths,
        torch.float32,
        prefix_of=torch.tensor([-1, 0, 0]),
        blocks=Blocks(32, chosen),
    )


def test_shared_prefix_equals_replicated_prompts():
    prompt, completions = 35, [4, 40, 1]
    q, k, v, grad = attention_inputs(prompt + sum(completions), 4, 2, 16)
    grad[:prompt] = 0.0
    prefix_of = torch.tensor([-1, 0, 0, 0])
    shared = run((q, k, v, grad), [prompt, *completions], "triton", prefix_of=prefix_of)
    rows, start = [], prompt
    for count in completions:
        rows += [*range(prompt), *range(start, start + count)]
        start += count
    index = torch.tensor(rows)
    copies = run(
        tuple(t[index] for t in (q, k, v, grad)), [prompt + c for c in completions], "triton"
    )
    for value, copy in zip(shared[1:], copies[1:], strict=True):
        summed = torch.zeros_like(value).index_add(0, index, copy)
        assert relative_error(value, summed) < 1e-6


# numpy reports the poison in the neighbours' own rows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_neighbours_and_stray_rows_change_no_bit(poison):
    lengths, mine = [6, 20, 19, 14], slice(6, 45)
    options = {"prefix_of": torch.tensor([-1, -1, 1, -1])}
    clean = attention_inputs(63, 2, 1, 16)
    before = run(clean, lengths, "triton", **options)
    poisoned = [tensor.clone() for tensor in clean]
    for tensor in poisoned:
        tensor[:6] = poison
        tensor[45:] = poison
    after = run(poisoned, lengths, "triton", **options)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[mine], b[mine])
        assert torch.equal(b[59:], torch.zeros_like(b[59:]))


def test_packing_order_and_repetition_change_no_bit():
    inputs = attention_inputs(83, 2, 1, 16)
    options = {"prefix_of": torch.tensor([-1, 0, 0, -1, 3])}
    first = run(inputs, [20, 5, 17, 33, 8], "triton", **options)
    again = run(inputs, [20, 5, 17, 33, 8], "triton", **options)
    index = torch.tensor([*range(42, 83), *range(42)])
    moved = run(
        tuple(t[index] for t in inputs),
        [33, 8, 20, 5, 17],
        "triton",
        prefix_of=torch.tensor([-1, 0, -1, 2, 2]),
    )
    for a, b, c in zip(first, again, moved, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[index], c)


def test_any_strides_give_the_contiguous_result():
    inputs = attention_inputs(30, 4, 2, 16)
    truth = run(inputs, [13, 17], "triton")
    strided = tuple(t.transpose(0, 2).contiguous().transpose(0, 2) for t in inputs)
    spread = tuple(torch.stack([t, t * 9], dim=1)[:, 0] for t in inputs)
    for inputs_ in (strided, spread):
        for a, b in zip(truth, run(inputs_, [13, 17], "triton"), strict=True):
            assert torch.equal(a, b)


def test_an_expanded_gradient_is_read_by_its_strides():
    q, k, v, grad = attention_inputs(30, 2, 1, 16)
    expanded = run((q, k, v, grad[:1, :1, :1].expand_as(grad)), [13, 17], "triton")
    dense = run((q, k, v, grad[:1, :1, :1].expand_as(grad).clone()), [13, 17], "triton")
    for a, b in zip(expanded, dense, strict=True):
        assert torch.equal(a, b)
