"""What `headrace domain check` sees of a domain without a jail."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.broker.records import Execution, Verdict
from headrace.environments import check
from headrace.environments.check import check_domain, check_generation
from headrace.environments.domains.arithmetic import Arithmetic
from headrace.environments.protocol import Domain, Message, Observation, Session, Task
from headrace.environments.registry import get_domain


class Careless(Arithmetic):
    """Draws from the generator that everybody shares."""

    def task(self, index: int, *, split: str, level: int) -> Task:
        task = super().task(index, split=split, level=level)
        return replace(task, messages=[Message(role="user", content=str(random.random()))])


class OneSplit(Arithmetic):
    """Makes the same tasks for training and for the held-out split."""

    def task(self, index: int, *, split: str, level: int) -> Task:
        return replace(super().task(index, split="train", level=level), split=split)


class Misnamed(Arithmetic):
    """Forgets to say which task it made."""

    def task(self, index: int, *, split: str, level: int) -> Task:
        return replace(super().task(index, split=split, level=level), index=0)


@pytest.mark.parametrize("ident", ["arithmetic", "parity", "python_functions"])
def test_a_domain_of_the_project_makes_each_task_again_and_keeps_its_splits_apart(
    ident: str,
) -> None:
    domain = get_domain(ident)
    for level in range(domain.levels):
        assert check_generation(domain, level) == []


@pytest.mark.parametrize(
    ("domain", "first"),
    [
        (Careless(), "task arithmetic/0/train/0 differs when it is made again; draw everything"),
        (OneSplit(), "train and held-out share tasks, such as [Message("),
        (Misnamed(), "task arithmetic/0/train/1 calls itself arithmetic/0/train/0"),
    ],
)
def test_a_mistake_in_the_generation_is_named_with_its_task(domain: Domain, first: str) -> None:
    problems = check_generation(domain, 0)
    assert problems[0].startswith(first)
    assert len(problems) <= 3


class Played(Arithmetic):
    """A domain without a jail, whose sessions wait for ever or raise."""

    def __init__(self, *, waits: bool) -> None:
        self.closed = 0
        self.executions: list[Execution] = []
        self._waits = waits

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        return "right"

    async def open(self, task: Task, *, seed: int) -> Session:
        return self

    async def step(self, action: str) -> Observation:
        if self._waits:
            await asyncio.Event().wait()
        raise TimeoutError("a mistake")

    async def verdict(self) -> Verdict:
        raise AssertionError("no turn ended")

    async def close(self) -> None:
        self.closed += 1


async def test_a_session_that_never_answers_is_named_with_its_answer_and_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"_EPISODE_S": 0.05, "HOSTILE": {"nan": "nan"}, "LIMITS_HIT": {}}.items():
        monkeypatch.setattr(check, name, value)
    domain = Played(waits=True)
    report = await check_domain(domain, level=0, tasks=1)
    where = "has no verdict within 0.05 s on task arithmetic/0/train/0: give every wait"
    whats = ("the oracle", "the answer 'an empty answer'", "the answer 'nan'")
    assert len(report.problems) == domain.closed == 3
    for problem, what in zip(report.problems, whats, strict=True):
        assert problem.startswith(f"{what} {where}")


async def test_a_session_that_does_not_close_is_named_with_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Open(Played):
        async def close(self) -> None:
            await asyncio.Event().wait()

    for name, value in {"_CLOSE_S": 0.05, "HOSTILE": {}, "LIMITS_HIT": {}}.items():
        monkeypatch.setattr(check, name, value)
    report = await check_domain(Open(waits=False), level=0, tasks=1)
    assert [problem.partition(": ")[2] for problem in report.problems] == [
        "close_deadline: the session was not closed within 0.05 s"
    ] * 2


async def test_an_error_in_a_domains_code_keeps_its_traceback_and_says_what_led_to_it() -> None:
    domain = Played(waits=False)
    with pytest.raises(TimeoutError, match="a mistake") as caught:
        await check_domain(domain, level=0, tasks=1)
    assert caught.value.__notes__ == ["raised for the oracle on task arithmetic/0/train/0"]
    assert domain.closed == 1
