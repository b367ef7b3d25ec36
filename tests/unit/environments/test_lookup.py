"""Generation of the lookup domain's tasks, without a jail."""

import re

import pytest

from headrace.environments.domains.lookup import EXAMPLE, ITEMS, Lookup
from headrace.environments.domains.lookup_items import FIRST, SECOND

LOOKUP = Lookup()
LEVELS = range(LOOKUP.levels)


def test_a_heldout_item_is_in_no_training_task_of_any_level() -> None:
    train, heldout = (
        {
            item
            for level in LEVELS
            for index in range(500)
            for item in LOOKUP.task(index, split=split, level=level).data["items"]
        }
        for split in ("train", "heldout")
    )
    assert len(train) > 1000
    assert len(heldout) > 500
    assert not train & heldout


def test_items_are_thousands_and_each_word_counts_once() -> None:
    assert len(set(FIRST)) == len(FIRST)
    assert len(set(SECOND)) == len(SECOND)
    assert len(FIRST) * len(SECOND) > 5000


@pytest.mark.parametrize("level", LEVELS)
def test_items_of_a_task_differ_and_the_question_names_those_asked_for(level: int) -> None:
    for index in range(50):
        task = LOOKUP.task(index, split="train", level=level)
        items, asked = task.data["items"], task.data["asked"]
        assert len(set(items)) == ITEMS
        named = [item for item in items if item in task.messages[-1].content]
        assert named == asked == items[: 2 if level == 1 else 1]


@pytest.mark.parametrize("level", LEVELS)
def test_a_task_holds_no_price_but_those_of_the_example(level: int) -> None:
    for index in range(50):
        task = LOOKUP.task(index, split="heldout", level=level)
        assert not re.search("[0-9]", repr(task.data))
        texts = [message.content for message in task.messages]
        assert set(re.findall("[0-9]+", " ".join(texts))) <= {EXAMPLE, "264"}
        assert not re.search("[0-9]", texts[-1])
        assert not any(item in text for text in texts[:-1] for item in task.data["items"])


@pytest.mark.parametrize(
    ("level", "answers", "last"),
    [
        (0, ["123"], "The price is 123."),
        (1, ["99", "456"], "The price is 456."),
        (1, ["456", "123"], "The price is 456."),
        (2, ["same as blue key", "123"], "The price is 123."),
    ],
)
def test_the_oracle_calls_what_is_needed_and_answers_with_what_it_heard(
    level: int, answers: list[str], last: str
) -> None:
    task = LOOKUP.task(0, split="train", level=level)
    needed = task.data["asked"] + (["blue key"] if level == 2 else [])
    turns = [LOOKUP.oracle(task, answers[:count]) for count in range(len(answers) + 1)]
    assert turns == [*(f'lookup("{item}")' for item in needed), last]
    assert len(turns) <= task.max_turns
