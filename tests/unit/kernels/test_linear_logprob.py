import math

import pytest
import torch

from headrace.kernels import linear_logprob
from tests.unit.kernels.cases import head_inputs, head_results, relative_error

TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 5e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 5e-3,
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "width", "classes", "temperature"),
    [(13, 33, 1003, 0.7), (700, 16, 4099, 1.0), (3, 16, 5, 1.3), (1, 5, 1, 1.0)],
)
def test_torch_path_equals_the_reference_with_every_gradient(
    rows, width, classes, temperature, dtype
):
    # The truth starts from the rounded inputs: what is under test is the arithmetic.
    hidden, weight, bias, targets, slopes = head_inputs(rows, width, classes)
    hidden, weight, bias = (t.to(dtype).double() for t in (hidden, weight, bias))
    truth = head_results(
        hidden, weight, bias, targets, slopes, "reference", temperature=temperature
    )
    values = head_results(
        hidden, weight, bias, targets, slopes, "torch", dtype, temperature=temperature
    )
    for name, value, true in zip(("lp", "H", "dh", "dw", "db"), values, truth, strict=True):
        limit = TOLERANCE[dtype] if name.startswith("d") else min(TOLERANCE[dtype], 1e-5)
        assert relative_error(value, true) < limit, name


def test_reference_is_log_softmax_and_its_entropy():
    hidden, weight, bias, targets, _ = head_inputs(8, 6, 11)
    result = linear_logprob(hidden, weight, targets, bias=bias, backend="reference")
    logits = hidden @ weight.T + bias
    counted = targets != -100
    truth = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(result.logprob, truth)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(result.entropy[counted], entropy[counted])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_ignored_rows_are_exactly_zero_whatever_they_hold(backend):
    hidden, weight, bias, targets, slopes = head_inputs(9, 8, 40)
    before = head_results(hidden, weight, bias, targets, slopes, backend)
    poisoned = hidden.clone()
    poisoned[targets == -100] = float("nan")
    after = head_results(poisoned, weight, bias, targets, slopes, backend)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
    for value in (after[0], after[1], after[2]):
        assert value[targets == -100].count_nonzero() == 0


def test_all_rows_ignored_or_none_at_all_give_zero_gradients():
    hidden, weight, bias, _, slopes = head_inputs(4, 8, 40)
    for rows in (4, 0):
        targets = torch.full((rows,), -100)
        values = head_results(hidden[:rows], weight, bias, targets, slopes[:, :rows], "torch")
        assert all(value.count_nonzero() == 0 for value in values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprob_and_entropy_stay_in_their_bounds(dtype):
    hidden, weight, bias, targets, _ = head_inputs(64, 16, 2500)
    for factor in (0.0, 1.0, 30.0):
        result = linear_logprob(
            (hidden * factor).to(dtype), weight.to(dtype), targets, bias=bias.to(dtype) * factor
        )
        assert (result.logprob <= 0).all()
        assert (result.entropy >= 0).all()
        assert (result.entropy <= math.log(2500)).all()


def test_a_sure_target_keeps_its_small_gradient_in_bfloat16():
    """p - 1 is about 1e-4 here; rounded to bfloat16 before the subtraction it would be zero."""
    weight = torch.zeros(2, 16)
    weight[0, 0] = 1.0
    hidden = torch.zeros(1, 16)
    hidden[0, 0] = 9.0
    targets = torch.tensor([0])
    grads: list[torch.Tensor] = []
    for dtype in (torch.float64, torch.bfloat16):
        leaf = hidden.to(dtype).requires_grad_()
        result = linear_logprob(leaf, weight.to(dtype), targets)
        grads += torch.autograd.grad(result.logprob.sum(), leaf)
    assert relative_error(grads[1], grads[0]) < 5e-3


def test_excluded_classes_have_no_probability_and_no_gradient():
    hidden, weight, bias, _, slopes = head_inputs(6, 8, 40)
    bias[10:] = -math.inf
    targets = torch.arange(6)
    full = head_results(hidden, weight, bias, targets, slopes, "torch", torch.float32)
    short = head_results(hidden, weight[:10], bias[:10], targets, slopes, "torch", torch.float32)
    torch.testing.assert_close(full[0], short[0])
    torch.testing.assert_close(full[1], short[1])
    torch.testing.assert_close(full[3][:10], short[3])
    assert full[3][10:].count_nonzero() == 0


def test_a_gradient_of_one_result_alone_is_complete():
    hidden, weight, bias, targets, slopes = head_inputs(9, 8, 40)
    for only in (0, 1):
        weights = slopes.clone()
        weights[1 - only] = 0.0
        truth = head_results(hidden, weight, bias, targets, weights, "reference")
        leaf = hidden.detach().requires_grad_()
        result = linear_logprob(leaf, weight, targets, bias=bias)
        (result[only] * slopes[only]).sum().backward()
        torch.testing.assert_close(leaf.grad, truth[2])


def test_the_process_precision_setting_is_put_back():
    hidden, weight, _, targets, _ = head_inputs(9, 8, 40)
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    linear_logprob(hidden.bfloat16(), weight.bfloat16(), targets)
    assert setting.fp32_precision == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": torch.tensor([0, 40, 1])}, r"targets\[1\] is 40"),
        ({"targets": torch.tensor([0, 1, -1])}, r"targets\[2\] is -1"),
        ({"targets": torch.tensor([0, 1])}, r"targets must be \[3\]"),
        ({"targets": torch.tensor([0.0, 1.0, 2.0])}, "must be integers"),
        ({"hidden": torch.zeros(3, 9)}, "hidden must be"),
        ({"hidden": torch.zeros(3, 8, dtype=torch.int32)}, r"torch\.int32"),
        ({"weight": torch.zeros(40, 8).half()}, r"torch\.float16"),
        ({"weight": torch.zeros(0, 8)}, "at least one class"),
        ({"bias": torch.zeros(39)}, "bias must be"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"backend": "fast"}, "'fast'"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(changes, message):
    arguments = {
        "hidden": torch.zeros(3, 8),
        "weight": torch.zeros(40, 8),
        "targets": torch.tensor([0, 1, 2]),
    } | changes
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)
