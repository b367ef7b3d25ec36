"""Reproducible task generation with a train/held-out split that cannot overlap.

A task is drawn from a generator seeded by (domain, level, split, index) and belongs to the split
that a hash of its content names. Drawing is repeated until the content is of the wanted split, so
that no content, however often it is drawn, is in both. Indices may repeat a content; who judges a
model asks `distinct_tasks`.
"""

import hashlib
import random
from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.environments.protocol import Domain, Task
from headrace.errors import ConfigError

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 5
"""One content out of this many is held out."""
_DRAWS = 10_000
_DRY = 300
"""Indices in a row without anything new after which a split counts as used up."""

C = TypeVar("C")


def draw(
    domain: str,
    make: Callable[[random.Random], tuple[str, C]],
    *,
    level: int,
    levels: int,
    split: str,
    index: int,
) -> C:
    """Draw the content of one task.

    Args:
        domain: identifier of the domain.
        make: draws a content and its canonical key: contents that a model could not tell apart in
            difficulty or answer (a swapped sum, say) share a key and therefore a split.
        level: difficulty.
        levels: number of levels of the domain.
        split: `train` or `heldout`.
        index: number of the task, at least 0.

    Raises:
        ConfigError: the level, split or index does not exist.
    """
    if split not in SPLITS:
        raise ConfigError(f"domain {domain}: split {split!r} is not one of {', '.join(SPLITS)}")
    if not 0 <= level < levels:
        raise ConfigError(f"domain {domain}: level {level} is not within 0 to {levels - 1}")
    if index < 0:
        raise ConfigError(f"domain {domain}: task index {index} is negative")
    rng = random.Random(_number(f"{domain}/{level}/{split}/{index}"))
    for _ in range(_DRAWS):
        key, content = make(rng)
        if split_of(domain, key) == split:
            return content
    raise ConfigError(f"domain {domain}: level {level} has no content of split {split!r}")


def distinct_tasks(domain: Domain, *, level: int, split: str, count: int) -> list[Task]:
    """First tasks of a split that differ, at most `count`: fewer where the split holds fewer.

    A question asked twice says less of a model than two questions, and an interval that counts it
    as two is too narrow. So tasks with a prompt of their own come first, then those that differ
    from them only in what the model is not shown; the same task never comes twice. What a smaller
    count gives is among what a larger one gives.
    """
    own: list[Task] = []
    alike: list[Task] = []
    prompts: set[bytes] = set()
    contents: set[bytes] = set()
    index = new_prompt = new_content = 0
    while len(own) < count:
        prompts_used_up = index - new_prompt > _DRY
        if prompts_used_up and (len(own) + len(alike) >= count or index - new_content > _DRY):
            break
        task = domain.task(index, split=split, level=level)
        index += 1
        prompt = msgspec.json.encode(task.messages)
        content = prompt + msgspec.json.encode(task.data, order="sorted")
        if content in contents:
            continue
        contents.add(content)
        new_content = index
        if prompt in prompts:
            alike.append(task)
            continue
        prompts.add(prompt)
        new_prompt = index
        own.append(task)
    return (own + alike)[:count]


def split_of(domain: str, key: str) -> str:
    """Split of a content; the level does not count, so that no level leaks into another."""
    return "heldout" if _number(f"{domain}|{key}") % HELDOUT_SHARE == 0 else "train"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
