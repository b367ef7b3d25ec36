"""Failures that other kernels were publicly reported to have, each as a rule of its whole kind."""

import math
import re
from pathlib import Path

import pytest
import torch

import headrace.kernels
from headrace.kernels import linear_logprob, packed_attention
from headrace.kernels.attention.layout import read_layout
from headrace.kernels.attention.plan import Mask, key_tiles, query_tiles
from tests.unit.kernels.cases import (
    attention_inputs,
    boundaries,
    head_inputs,
    head_results,
    relative_error,
)


def run(inputs, lengths, backend="triton", **options):
    q, k, v, grad = (t.detach() for t in inputs)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = packed_attention(q, k, v, boundaries(lengths), backend=backend, **options)
    return (out, *torch.autograd.grad(out, (q, k, v), grad))


def compare(inputs, lengths, limit=2e-6, **options):
    truth = run(inputs, lengths, "reference", **options)
    values = run((t.float() for t in inputs), lengths, **options)
    for value, true in zip(values, truth, strict=True):
        assert relative_error(value, true) < limit
    return values


def reserved(elements):
    """Memory that the system gives out only when it is touched, so it must not be filled here."""
    torch.use_deterministic_algorithms(False)
    memory = torch.empty(elements)
    torch.use_deterministic_algorithms(True)
    return memory


def test_addresses_beyond_int32_are_reached_in_every_tensor():
    """Rows lie 2^24 elements apart in memory that is reserved but hardly touched."""
    rows, apart = 129, 2**31 // 128
    memory = reserved(2**31 + 2**23)
    inputs = attention_inputs(rows, 1, 1, 16)
    far = [memory.as_strided((rows, 1, 16), (apart, 16, 1), 64 * place) for place in range(4)]
    for tensor, values in zip(far, inputs, strict=True):
        tensor.copy_(values)
    truth = run((t.float() for t in inputs), [rows])
    for value, true in zip(run(far, [rows]), truth, strict=True):
        assert torch.equal(value, true)


def test_addresses_beyond_int32_are_reached_in_hidden_states_and_weights():
    rows, apart = 129, 2**31 // 128
    memory = reserved(2**31 + 2**23)
    hidden, weight, bias, targets, slopes = head_inputs(rows, 16, rows)
    far_hidden = memory.as_strided((rows, 16), (apart, 1), 0)
    far_weight = memory.as_strided((rows, 16), (apart, 1), 64)
    far_hidden.copy_(hidden)
    far_weight.copy_(weight)
    arguments = (bias, targets, slopes, "triton", torch.float32)
    truth = head_results(hidden, weight, *arguments)
    values = head_results(far_hidden, far_weight, *arguments)
    for value, true in zip(values, truth, strict=True):
        assert torch.equal(value, true)


def test_plans_of_long_packs_hold_no_number_that_grows_with_the_square():
    mask = Mask(read_layout(boundaries([300_000, 190_485]), None, 490_485))
    for tiles in (query_tiles(mask, 128), key_tiles(mask, 128)):
        assert max(max(tile.stop, *tile.spans[0]) for tile in tiles) == 490_485
        assert sum(len(tile.spans) for tile in tiles) == len(tiles)


@pytest.mark.parametrize(
    "lengths", [[0, 1, 0, 1], [0, 5], [5, 0], [5, 0, 3], [0, 0], [1], [33], [32], [31]]
)
def test_empty_and_single_segments_in_any_place(lengths):
    compare(attention_inputs(sum(lengths), 2, 1, 16), lengths)


def test_an_empty_completion_leaves_its_prompt_without_its_gradient():
    inputs = attention_inputs(9, 2, 1, 16)
    prefix_of = torch.tensor([-1, 0, -1])
    shared = run((t.float() for t in inputs), [4, 0, 5], prefix_of=prefix_of)
    alone = run((t.float() for t in inputs), [4, 0, 5])
    assert all(torch.equal(a, b) for a, b in zip(shared, alone, strict=True))


def test_an_empty_prefix_is_no_prefix():
    inputs = tuple(t.float() for t in attention_inputs(9, 2, 1, 16))
    shared = run(inputs, [0, 4, 5], prefix_of=torch.tensor([-1, 0, -1]))
    alone = run(inputs, [0, 4, 5])
    assert all(torch.equal(a, b) for a, b in zip(shared, alone, strict=True))


def test_rows_beyond_the_last_boundary_are_zero_with_zero_gradient():
    for value in compare(attention_inputs(7, 2, 1, 16), [3, 2]):
        assert value[5:].count_nonzero() == 0


@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (4, 1)])
def test_query_heads_read_their_group_and_its_gradient_is_summed(heads):
    compare(attention_inputs(12, heads[0], heads[1], 16), [12])


@pytest.mark.parametrize("head_dim", [16, 17, 40, 72, 80])
def test_every_column_counts_whatever_the_head_dim(head_dim):
    inputs = attention_inputs(6, 1, 1, head_dim)
    before = compare(inputs, [6])
    for tensor in inputs:
        tensor[:, :, -1] += 1.0
    after = compare(inputs, [6])
    assert all(not torch.equal(a[..., -1], b[..., -1]) for a, b in zip(before, after, strict=True))


def test_lengths_around_the_tile_sizes():
    compare(attention_inputs(642, 1, 1, 16), [1, 127, 128, 129, 257])


def test_all_backends_agree_on_several_segments():
    inputs = attention_inputs(30, 4, 2, 16)
    compare(inputs, [7, 13, 10])
    torch_path = run((t.float() for t in inputs), [7, 13, 10], "torch")
    for value, true in zip(torch_path, run(inputs, [7, 13, 10], "reference"), strict=True):
        assert relative_error(value, true) < 2e-6


def test_a_segment_is_what_it_is_alone():
    """Nothing leaks and nothing is inferred: the middle segment by itself gives the same bits."""
    inputs = tuple(t.float() for t in attention_inputs(30, 2, 1, 16))
    packed = run(inputs, [7, 13, 10])
    alone = run((t[7:20] for t in inputs), [13])
    for one, two in zip(packed, alone, strict=True):
        assert torch.equal(one[7:20], two)


@pytest.mark.parametrize(("classes", "factor"), [(1003, 1.0), (1003, 30.0), (257, 0.0)])
def test_log_probabilities_are_never_positive_nor_entropy_out_of_bounds(classes, factor):
    hidden, weight, _, targets, _ = head_inputs(40, 24, classes)
    skewed = (hidden.float() * factor).T.contiguous().T
    result = linear_logprob(skewed, weight.float(), targets, backend="triton")
    truth = linear_logprob(skewed.double(), weight.double(), targets, backend="reference")
    assert (result.logprob <= 0).all()
    assert (result.entropy >= 0).all()
    assert (result.entropy <= math.log(classes)).all()
    assert relative_error(result.logprob, truth.logprob) < 1e-5


def test_many_rows_sum_into_the_weight_in_float32_and_none_is_filtered():
    hidden, weight, bias, targets, slopes = head_inputs(8192, 32, 128)
    hidden, weight, bias = (t.to(torch.float16).double() for t in (hidden, weight, bias))
    arguments = (bias, targets, slopes * 1e-2)
    truth = head_results(hidden, weight, *arguments, "reference")
    values = head_results(hidden, weight, *arguments, "triton", torch.float16)
    assert relative_error(values[3], truth[3]) < 1e-3


def test_weighted_rows_carry_their_own_weights_zero_and_negative():
    hidden, weight, bias, targets, slopes = head_inputs(12, 16, 90)
    slopes[0, :4] = torch.tensor([0.0, -1.0, 2.5, -0.5])
    truth = head_results(hidden, weight, bias, targets, slopes, "reference")
    values = head_results(hidden, weight, bias, targets, slopes, "triton", torch.float32)
    for value, true in zip(values, truth, strict=True):
        assert relative_error(value, true) < 5e-6


def test_a_sure_target_keeps_its_small_gradient():
    hidden, weight = torch.zeros(1, 16), torch.zeros(2, 16)
    hidden[0, 0], weight[0, 0] = 8.0, 1.0
    grads: list[torch.Tensor] = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float16, "triton")):
        leaf = hidden.to(dtype).requires_grad_()
        result = linear_logprob(leaf, weight.to(dtype), torch.tensor([0]), backend=backend)
        # The factor keeps the gradient out of float16's subnormal numbers.
        grads += torch.autograd.grad(result.logprob.sum() * 1024, leaf)
    assert abs(float(grads[1][0, 0] / grads[0][0, 0]) - 1) < 2e-3


def test_no_product_rounds_float32_to_tensor_core_precision():
    folder = Path(headrace.kernels.__file__).parent
    for file in folder.glob("*/triton_kernels.py"):
        text = file.read_text()
        products = re.findall(r"tl\.dot\((?:[^()]|\([^()]*(?:\([^()]*\))?[^()]*\))*\)", text)
        assert len(products) == text.count("tl.dot(")
        assert all('input_precision="ieee"' in product for product in products)
