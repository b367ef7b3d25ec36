"""Which tasks a model is judged on."""

import itertools

import pytest

from headrace.environments.generate import distinct_tasks
from headrace.environments.protocol import Message, Task
from headrace.environments.registry import get_domain


class Drawn:
    """A domain of which each index draws a (prompt, hidden data) from a list, again and again."""

    id = "drawn"
    levels = 1

    def __init__(self, *drawn):
        self.drawn = drawn

    def task(self, index, *, split, level):
        prompt, hidden = self.drawn[index % len(self.drawn)]
        messages = [Message(role="user", content=prompt)]
        return Task(
            domain="drawn", level=level, split=split, index=index, messages=messages,
            data={"hidden": hidden},
        )  # fmt: skip


def asked(domain, count):
    tasks = distinct_tasks(domain, level=0, split="heldout", count=count)
    return [(task.messages[0].content, task.data["hidden"]) for task in tasks]


MIXED = Drawn(("a", 1), ("a", 1), ("a", 2), ("b", 1), ("a", 3), ("c", 1))


def test_prompts_of_their_own_come_first_and_no_task_twice():
    assert asked(MIXED, 3) == [("a", 1), ("b", 1), ("c", 1)]
    assert asked(MIXED, 5) == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("a", 3)]


def test_a_split_that_holds_fewer_gives_all_it_has():
    assert asked(MIXED, 100) == asked(MIXED, 5)
    assert asked(MIXED, 0) == []


def test_tasks_that_differ_only_in_what_is_hidden_are_all_asked():
    same = Drawn(*(("fix the test", hidden) for hidden in range(700)))
    assert asked(same, 650) == [("fix the test", hidden) for hidden in range(650)]


@pytest.mark.parametrize("name", ["arithmetic", "python_functions", "terminal", "lookup", "parity"])
def test_a_smaller_count_is_contained_in_a_larger_one(name):
    domain = get_domain(name)
    some, more = (
        {task.ref.hash for task in distinct_tasks(domain, level=0, split="heldout", count=count)}
        for count in (40, 400)
    )
    assert len(some) == 40
    assert some < more


@pytest.mark.parametrize("name", ["arithmetic", "python_functions"])
def test_one_question_is_one_task_however_often_it_is_drawn(name):
    domain = get_domain(name)
    drawn = [domain.task(index, split="heldout", level=0) for index in range(400)]
    by_prompt = itertools.groupby(
        sorted(drawn, key=lambda task: task.messages[-1].content),
        key=lambda task: task.messages[-1].content,
    )
    counts = [len({repr(task.data) for task in tasks}) for _, tasks in by_prompt]
    assert len(counts) < 200
    assert set(counts) == {1}
