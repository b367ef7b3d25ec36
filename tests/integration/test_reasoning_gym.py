"""Datasets of reasoning-gym through the real jail: right, odd and hostile answers."""

import msgspec
import pytest

from headrace.broker.records import Verdict
from headrace.environments.protocol import EnvironmentFailure, Session, Task, check_verdict
from headrace.environments.registry import get_domain

pytestmark = pytest.mark.jail


def first(name: str, level: int = 0) -> Task:
    return get_domain(f"reasoning_gym.{name}").task(0, split="train", level=level)


async def judge(task: Task, action: str) -> tuple[Verdict, Session]:
    session = await get_domain(task.domain).open(task, seed=3)
    try:
        await session.step(action)
        verdict = await session.verdict()
    finally:
        await session.close()
    check_verdict(verdict, turns=1)
    return verdict, session


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("leg_counting", 0),
        ("leg_counting", 1),
        ("number_sorting", 0),  # numpy
        ("simple_equations", 0),  # sympy
        ("countdown", 0),
        ("bf", 0),
    ],
)
async def test_the_oracle_wins_and_silence_does_not(name: str, level: int) -> None:
    task = first(name, level)
    verdict, session = await judge(task, get_domain(task.domain).oracle(task, []))
    assert (verdict.score, verdict.success, verdict.side) == (1.0, True, "")
    assert [each.purpose for each in session.executions] == ["score"]
    assert "namespaces" in session.executions[0].isolation
    silent, _ = await judge(task, "")
    assert silent.score < 1
    assert (silent.success, silent.side, silent.kind) == (False, "model", "wrong_answer")


async def test_part_of_the_score_is_no_success() -> None:
    task = first("leg_counting")
    verdict, _ = await judge(task, f"<answer>It has {task.data['answer']} legs.</answer>")
    assert 0 < verdict.score < 1
    assert (verdict.success, verdict.kind) == (False, "wrong_answer")


FORGED = "__import__('os').write(3, b'1.0') or __import__('os')._exit(0)"


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("string_insertion", FORGED),  # its scorer evaluates the answer
        ("countdown", "9**9**9**9"),  # computes for ever
        ("prime_factorization", "xyzzy"),  # its scorer raises
        ("complex_arithmetic", "nan"),  # as near to every number as that number itself
        ("simple_integration", "exit(0)"),
    ],
)
async def test_an_answer_that_no_scorer_can_read_is_the_models_failure(
    name: str, action: str
) -> None:
    verdict, _ = await judge(first(name), action)
    assert (verdict.score, verdict.success) == (0.0, False)
    assert (verdict.side, verdict.kind) == ("model", "unparsable")


@pytest.mark.parametrize("data", [{"seed": 1}, {"answer": "xyzzy"}])
async def test_a_scorer_that_fails_on_the_right_answer_is_the_environments_failure(
    data: dict[str, object],
) -> None:
    task = first("prime_factorization")
    broken = msgspec.structs.replace(task, data=task.data | data)
    with pytest.raises(EnvironmentFailure) as caught:
        await judge(broken, "abc")
    assert caught.value.kind == "scorer_error"
