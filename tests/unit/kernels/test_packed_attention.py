import pytest
import torch

from headrace.kernels import Blocks, packed_attention
from tests.unit.kernels.cases import attention_inputs, boundaries, relative_error

TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 3e-6,
    torch.float16: 1.5e-3,
    torch.bfloat16: 1e-2,
}
GROUP = ([20, 5, 0, 17, 3, 9], [-1, 0, 0, 0, -1, 0])
SPARSE = Blocks(16, torch.tensor([[0, -1], [1, -1], [0, 0], [0, -1], [0, 1], [2, 2], [0, -1]]))


def run(inputs, lengths, backend, dtype=torch.float64, **options):
    """The output and the gradients of q, k, v."""
    q, k, v, grad = (tensor.to(dtype).detach() for tensor in inputs)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = packed_attention(q, k, v, boundaries(lengths), backend=backend, **options)
    return (out, *torch.autograd.grad(out, (q, k, v), grad))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([5, 1, 0, 17, 130], {}),
        ([0, 1, 0, 1], {}),
        ([1, 127, 128, 129, 257], {}),
        (GROUP[0], {"prefix_of": torch.tensor(GROUP[1])}),
        ([20, 300, 40], {"prefix_of": torch.tensor([-1, 0, -1]), "window": 7}),
        ([20, 70, 0], {"prefix_of": torch.tensor([-1, 0, -1]), "blocks": SPARSE}),
        ([20, 70, 0], {"window": 33, "blocks": SPARSE, "scale": 0.3}),
    ],
)
def test_torch_path_equals_the_reference_with_every_gradient(lengths, options, dtype):
    inputs = attention_inputs(sum(lengths) + 2, 6, 2, 24)
    truth = run(inputs, lengths, "reference", **options)
    values = run(inputs, lengths, "torch", dtype, **options)
    for name, value, true in zip(("o", "dq", "dk", "dv"), values, truth, strict=True):
        assert relative_error(value, true) < TOLERANCE[dtype], name


def test_reference_is_the_textbook_formula_on_one_segment():
    q, k, v, _ = attention_inputs(7, 1, 1, 16)
    out = packed_attention(q, k, v, boundaries([7]), backend="reference")
    for row in range(7):
        weights = torch.softmax(k[: row + 1, 0] @ q[row, 0] / 4.0, dim=0)
        torch.testing.assert_close(out[row, 0], weights @ v[: row + 1, 0])


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("query_heads", "key_heads"), [(6, 2), (9, 3), (4, 1), (2, 2)])
def test_key_head_of_each_query_head_is_its_group(query_heads, key_heads, backend):
    inputs = attention_inputs(12, query_heads, key_heads, 16)
    q, k, v, grad = inputs
    group = query_heads // key_heads
    wide = (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), grad)
    out, dq, dk, dv = run(inputs, [12], backend)
    out_w, dq_w, dk_w, dv_w = run(wide, [12], "reference")
    torch.testing.assert_close(out, out_w)
    torch.testing.assert_close(dq, dq_w)
    torch.testing.assert_close(dk, dk_w.unflatten(1, (key_heads, group)).sum(2))
    torch.testing.assert_close(dv, dv_w.unflatten(1, (key_heads, group)).sum(2))


def test_shared_prefix_equals_replicated_prompts():
    prompt, completions = 11, [4, 7, 1]
    q, k, v, grad = attention_inputs(prompt + sum(completions), 6, 2, 16)
    grad[:prompt] = 0.0
    prefix_of = torch.tensor([-1, 0, 0, 0])
    shared = run((q, k, v, grad), [prompt, *completions], "torch", prefix_of=prefix_of)
    rows, start = [], prompt
    for count in completions:
        rows += [*range(prompt), *range(start, start + count)]
        start += count
    index = torch.tensor(rows)
    copies = run(
        tuple(t[index] for t in (q, k, v, grad)), [prompt + c for c in completions], "torch"
    )
    for value, copy in zip(shared[1:], copies[1:], strict=True):
        torch.testing.assert_close(value, torch.zeros_like(value).index_add(0, index, copy))
    completion = index >= prompt
    torch.testing.assert_close(shared[0][index[completion]], copies[0][completion])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_neighbours_and_stray_rows_change_nothing(poison):
    lengths, mine = [6, 9, 4], slice(6, 15)
    clean = attention_inputs(21, 4, 2, 16)
    before = run(clean, lengths, "torch")
    poisoned = [tensor.clone() for tensor in clean]
    for tensor in poisoned:
        tensor[:6] = poison
        tensor[15:] = poison
    after = run(poisoned, lengths, "torch")
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[mine], b[mine])
        assert torch.equal(b[19:], torch.zeros_like(b[19:]))


def test_packing_order_and_repetition_change_no_bit():
    lengths, prefix_of = [20, 5, 17, 33, 8], [-1, 0, 0, -1, 3]
    inputs = [t.float() for t in attention_inputs(sum(lengths), 6, 2, 16)]
    first = run(inputs, lengths, "torch", torch.float32, prefix_of=torch.tensor(prefix_of))
    again = run(inputs, lengths, "torch", torch.float32, prefix_of=torch.tensor(prefix_of))
    index = torch.tensor([*range(42, 83), *range(42)])
    moved = run(
        [t[index] for t in inputs],
        [33, 8, 20, 5, 17],
        "torch",
        torch.float32,
        prefix_of=torch.tensor([-1, 0, -1, 2, 2]),
    )
    for a, b, c in zip(first, again, moved, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[index], c)


def test_any_strides_give_the_contiguous_result():
    inputs = attention_inputs(30, 4, 2, 16)
    strided = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in inputs]
    spread = [torch.stack([t, t * 9], dim=1)[:, 0] for t in inputs]
    for value in (strided, spread):
        for a, b in zip(run(inputs, [13, 17], "torch"), run(value, [13, 17], "torch"), strict=True):
            torch.testing.assert_close(a, b)


def test_an_expanded_gradient_is_read_by_its_strides():
    q, k, v, grad = attention_inputs(30, 4, 2, 16)
    expanded = run((q, k, v, grad[:1, :1, :1].expand_as(grad)), [13, 17], "torch")
    dense = run((q, k, v, grad[:1, :1, :1].expand_as(grad).clone()), [13, 17], "torch")
    for a, b in zip(expanded, dense, strict=True):
        torch.testing.assert_close(a, b)


def test_no_rows_at_all_give_empty_results():
    inputs = attention_inputs(0, 4, 2, 16)
    for lengths in ([], [0], [0, 0]):
        assert all(t.shape[0] == 0 for t in run(inputs, lengths, "torch"))


def test_rows_that_belong_to_nobody_are_zero():
    inputs = attention_inputs(5, 4, 2, 16)
    for backend in ("torch", "reference"):
        assert all(t.count_nonzero() == 0 for t in run(inputs, [], backend))


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 4], {"prefix_of": torch.tensor([-1])}, "1 entries for 2 segments"),
        ([3, 4], {"prefix_of": torch.tensor([-1, 2])}, r"prefix_of\[1\] is 2"),
        ([3, 4], {"prefix_of": torch.tensor([0, -1])}, "the segment itself"),
        ([3, 2, 2], {"prefix_of": torch.tensor([-1, 0, 1])}, "do not nest"),
        ([3, 4], {"prefix_of": torch.tensor([-1.0, 0.0])}, "one-dimensional integer"),
        ([3, 5], {}, "ends at 8, but the tensors have 7 rows"),
        ([5, -2], {}, "falls from 5 to 3"),
        ([7], {"window": 0}, "window is 0"),
        ([7], {"backend": "fast"}, "'fast'"),
        ([7], {"blocks": Blocks(8, torch.tensor([[0]]))}, "size is 8"),
        ([7], {"blocks": Blocks(16, torch.tensor([[1]]))}, "names block 1"),
        ([7], {"blocks": Blocks(16, torch.tensor([[0], [0]]))}, r"\[1, width\]"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(lengths, options, message):
    q, k, v, _ = attention_inputs(7, 4, 2, 16)
    with pytest.raises(ValueError, match=message):
        packed_attention(q, k, v, boundaries(lengths), **options)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((7, 4, 16), (7, 3, 16)), "4 query heads"),
        (((7, 4, 16), (6, 2, 16)), "must be"),
        (((7, 4, 16), (7, 2, 32)), "head_dim is 16 for q and 32"),
        (((7, 4, 8), (7, 2, 8)), "head_dim is 8"),
        (((7, 4, 257), (7, 2, 257)), "head_dim is 257"),
        (((7, 4), (7, 2)), "must be"),
    ],
)
def test_bad_shapes_are_refused(shapes, message):
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        packed_attention(q, k, k, boundaries([7]))


def test_bad_dtypes_and_boundaries_are_refused():
    q, k, v, _ = (t.float() for t in attention_inputs(7, 4, 2, 16))
    with pytest.raises(ValueError, match=r"torch\.int32"):
        packed_attention(q.int(), k.int(), v.int(), boundaries([7]))
    with pytest.raises(ValueError, match=r"torch\.float16"):
        packed_attention(q, k.half(), v, boundaries([7]))
    with pytest.raises(ValueError, match="starts at 1"):
        packed_attention(q, k, v, torch.tensor([1, 7]))
    with pytest.raises(ValueError, match="is empty"):
        packed_attention(q, k, v, torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match="one-dimensional integer"):
        packed_attention(q, k, v, torch.tensor([0.0, 7.0]))
