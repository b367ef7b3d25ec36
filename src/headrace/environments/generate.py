"""Reproducible task generation with a train/held-out split that cannot overlap.

A task is drawn from a generator seeded by (domain, level, split, index) and belongs to the split
that a hash of its content names. Drawing is repeated until the content is of the wanted split, so
that no content, however often it is drawn, is in both.
"""

import hashlib
import random
from collections.abc import Callable
from typing import TypeVar

from headrace.errors import ConfigError

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 5
"""One content out of this many is held out."""
_DRAWS = 10_000

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


def split_of(domain: str, key: str) -> str:
    """Split of a content; the level does not count, so that no level leaks into another."""
    return "heldout" if _number(f"{domain}|{key}") % HELDOUT_SHARE == 0 else "train"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
