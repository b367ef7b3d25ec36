"""What `headrace domain check` sees of a domain before anything is judged."""

import random

import pytest
from msgspec.structs import replace

from headrace.environments.check import check_generation
from headrace.environments.domains.arithmetic import Arithmetic
from headrace.environments.protocol import Domain, Message, Task
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
