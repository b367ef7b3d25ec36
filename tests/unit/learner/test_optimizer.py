import pytest
import torch
from torch.nn import Parameter

from headrace.config import Learner
from headrace.errors import TrainingError
from headrace.learner.optimizer import MasterAdamW


def backward(parameter: Parameter, gradient: float) -> None:
    (parameter * torch.full_like(parameter, gradient)).sum().backward()


def test_gradients_of_micro_batches_are_summed_in_float32():
    parameter = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"w": parameter}, Learner(clip_grad=1e9))
    backward(parameter, 1.0)
    # bfloat16 cannot hold 1 + 2^-10
    backward(parameter, 2.0**-10)
    assert optimizer.step(1, 4) == pytest.approx(3**0.5 * (1 + 2**-10) / 4, rel=1e-6)
    moment = optimizer.state()["w.exp_avg"]
    torch.testing.assert_close(moment, torch.full((3,), 0.1 * (1 + 2**-10) / 4), rtol=1e-6, atol=0)


def test_updates_below_a_rounding_step_add_up():
    parameter = Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"w": parameter}, Learner(lr=1e-3))
    seen = []
    for step in range(1, 9):
        backward(parameter, -1.0)
        optimizer.step(step, 1)
        seen.append(parameter.item())
    assert seen[0] == 1.0
    assert seen[-1] == 1.0078125
    assert optimizer.masters["w"].item() == pytest.approx(1.008, abs=1e-5)


def test_only_matrices_decay():
    matrix, vector = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    optimizer = MasterAdamW({"m": matrix, "v": vector}, Learner(lr=0.1, weight_decay=0.5))
    for parameter in (matrix, vector):
        backward(parameter, 0.0)
    optimizer.step(1, 1)
    assert matrix.flatten().tolist() == pytest.approx([0.95] * 4)
    assert vector.tolist() == [1.0, 1.0]


def test_a_gradient_that_is_not_finite_changes_nothing():
    parameter = Parameter(torch.ones(2))
    optimizer = MasterAdamW({"w": parameter}, Learner())
    backward(parameter, float("inf"))
    with pytest.raises(TrainingError, match="gradient norm of step 1 is inf"):
        optimizer.step(1, 1)
    assert parameter.tolist() == [1.0, 1.0]
    assert optimizer.state() == {}
    backward(parameter, 1.0)
    assert optimizer.step(1, 1) == pytest.approx(2**0.5)


def test_a_parameter_that_never_gets_a_gradient_stays():
    used, unused = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = MasterAdamW({"used": used, "unused": unused}, Learner(lr=0.1, weight_decay=0.5))
    backward(used, 1.0)
    optimizer.step(1, 1)
    assert unused.tolist() == [1.0, 1.0]
    assert set(optimizer.state()) == {"used.step", "used.exp_avg", "used.exp_avg_sq"}
