import math

import pytest
import torch

from headrace.kernels import linear_logprob
from tests.unit.kernels.cases import head_inputs, head_results, relative_error

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "width", "classes", "temperature"),
    [(70, 33, 1003, 0.7), (3, 16, 5, 1.3), (1, 5, 1, 1.0), (20, 16, 8500, 1.0)],
)
def test_kernels_equal_float64_with_every_gradient(rows, width, classes, temperature, dtype):
    hidden, weight, bias, targets, slopes = head_inputs(rows, width, classes)
    hidden, weight, bias = (t.to(dtype).double() for t in (hidden, weight, bias))
    options = {"temperature": temperature}
    truth = head_results(hidden, weight, bias, targets, slopes, "reference", **options)
    values = head_results(hidden, weight, bias, targets, slopes, "triton", dtype, **options)
    for name, value, true in zip(("lp", "H", "dh", "dw", "db"), values, truth, strict=True):
        limit = TOLERANCE[dtype] if name.startswith("d") else 1e-5
        assert relative_error(value, true) < limit, name


def test_without_a_bias_the_answer_is_that_of_a_zero_bias():
    hidden, weight, bias, targets, _ = head_inputs(9, 16, 70)
    zero = torch.zeros_like(bias).float()
    without = linear_logprob(hidden.float(), weight.float(), targets, backend="triton")
    with_zero = linear_logprob(hidden.float(), weight.float(), targets, bias=zero, backend="triton")
    assert torch.equal(without.logprob, with_zero.logprob)
    assert torch.equal(without.entropy, with_zero.entropy)


# numpy reports the poison in the neighbours' own rows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_does_not_depend_on_its_neighbours_or_their_number():
    hidden, weight, bias, _, _ = (t.float() for t in head_inputs(50, 16, 300))
    targets = torch.arange(50)
    whole = linear_logprob(hidden, weight, targets, bias=bias, backend="triton")
    # From a tile's start: the interpreter's own products depend on a row's place in its tile.
    part = linear_logprob(hidden[32:], weight, targets[32:], bias=bias, backend="triton")
    hidden[:40] = math.nan
    mixed = linear_logprob(hidden, weight, targets, bias=bias, backend="triton")
    for one, two, three in zip(whole, part, mixed, strict=True):
        assert torch.equal(one[32:], two)
        assert torch.equal(one[40:], three[40:])


def test_ignored_rows_are_exactly_zero_whatever_they_hold():
    hidden, weight, bias, targets, slopes = head_inputs(9, 8, 40)
    arguments = (weight, bias, targets, slopes, "triton", torch.float32)
    before = head_results(hidden, *arguments)
    poisoned = hidden.clone()
    poisoned[targets == -100] = math.nan
    after = head_results(poisoned, *arguments)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
    for value in after[:3]:
        assert value[targets == -100].count_nonzero() == 0


def test_no_rows_give_empty_results_and_zero_gradients():
    hidden, weight, bias, _, slopes = head_inputs(4, 8, 40)
    for rows in (4, 0):
        targets = torch.full((rows,), -100)
        values = head_results(
            hidden[:rows], weight, bias, targets, slopes[:, :rows], "triton", torch.float32
        )
        assert all(value.count_nonzero() == 0 for value in values)


def test_excluded_classes_have_no_probability_and_no_gradient():
    hidden, weight, bias, _, slopes = head_inputs(6, 8, 140)
    bias[10:] = -math.inf
    targets = torch.arange(6)
    full = head_results(hidden, weight, bias, targets, slopes, "triton", torch.float32)
    short = head_results(hidden, weight[:10], bias[:10], targets, slopes, "triton", torch.float32)
    torch.testing.assert_close(full[0], short[0])
    torch.testing.assert_close(full[1], short[1])
    torch.testing.assert_close(full[3][:10], short[3])
    assert full[3][10:].count_nonzero() == 0


def test_repetition_changes_no_bit():
    inputs = head_inputs(40, 24, 500)
    first = head_results(*inputs, "triton", torch.float32)
    again = head_results(*inputs, "triton", torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
