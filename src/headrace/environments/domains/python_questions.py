"""The functions that `python_functions` asks for: templates with a random constant."""

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "plus": operator.add,
    "minus": operator.sub,
    "times": operator.mul,
}
LIST_LENGTH = 4


class Question(Struct, frozen=True):
    """A function to write."""

    key: str
    """Equal for questions that differ in nothing but the order of words."""
    text: str
    """What the function returns, in words."""
    parameters: Sequence[str]
    """`v` is a list of integers, every other parameter an integer."""
    function: Callable[..., Any]
    near: int
    """A number at which the function's answers change, so that inputs lie on both sides."""

    def inputs(self, rng: random.Random, count: int) -> list[list[Any]]:
        """Draw `count` different argument lists."""
        drawn: list[list[Any]] = []
        while len(drawn) < count:
            values = [
                [rng.randint(-20, 99) for _ in range(LIST_LENGTH)]
                if name == "v"
                else self.near + rng.randint(-self.near - 20, 40)
                for name in self.parameters
            ]
            # equal arguments cannot tell a from b
            if values not in drawn and (len(values) == 1 or values[0] != values[1]):
                drawn.append(values)
        # a predicate must be seen to say both
        answers = [self.function(*values) for values in drawn]
        if len({repr(answer) for answer in answers[1:]}) == 1:
            return self.inputs(rng, count)
        return drawn


def chain(rng: random.Random, *, shuffled: bool) -> Question:
    """`a plus b times 7`: two parameters and a constant, with Python's precedence."""
    constant = rng.randint(2, 99)
    first, second = rng.choice(list(OPERATORS)), rng.choice(list(OPERATORS))
    items = ["a", "b", str(constant)]
    if shuffled:
        rng.shuffle(items)

    def function(a: int, b: int) -> int:
        known = {"a": a, "b": b, str(constant): constant}
        x, y, z = (known[item] for item in items)
        if second == "times" and first != "times":
            return OPERATORS[first](x, y * z)
        return OPERATORS[second](OPERATORS[first](x, y), z)

    return Question(
        key=f"chain {sorted((first, second))} {constant}",
        text=f"{items[0]} {first} {items[1]} {second} {items[2]}",
        parameters=("a", "b"),
        function=function,
        near=constant,
    )


def ordered_chain(rng: random.Random) -> Question:
    """A chain that names the parameters in order, then the constant."""
    return chain(rng, shuffled=False)


def shuffled_chain(rng: random.Random) -> Question:
    """A chain in any order."""
    return chain(rng, shuffled=True)


def list_fold(rng: random.Random) -> Question:
    """One number of a list, changed by a constant."""
    folds: dict[str, Callable[[list[int]], int]] = {
        "the sum": sum,
        "the largest item": max,
        "the smallest item": min,
        "the length": len,
        "the first item": operator.itemgetter(0),
        "the last item": operator.itemgetter(-1),
    }
    name, word, constant = rng.choice(list(folds)), rng.choice(list(OPERATORS)), rng.randint(2, 20)
    text = f"{name} of the list v {word} {constant}"
    return Question(
        key=text,
        text=text,
        parameters=("v",),
        function=lambda v: OPERATORS[word](folds[name](v), constant),
        near=constant,
    )


def remainder(rng: random.Random) -> Question:
    """A remainder, or whether there is none."""
    constant = rng.randint(2, 20)
    texts: dict[str, Callable[[int], Any]] = {
        f"the remainder of a divided by {constant}": lambda a: a % constant,
        f"whether a is divisible by {constant}": lambda a: a % constant == 0,
    }
    return _one_of(rng, texts, constant)


def comparison(rng: random.Random) -> Question:
    """Which side of a constant the argument lies on."""
    constant = rng.randint(2, 99)
    texts: dict[str, Callable[[int], Any]] = {
        f"whether a is greater than {constant}": lambda a: a > constant,
        f"whether a is at most {constant}": lambda a: a <= constant,
        f"the larger of a and {constant}": lambda a: max(a, constant),
        f"the smaller of a and {constant}": lambda a: min(a, constant),
    }
    return _one_of(rng, texts, constant)


def _one_of(rng: random.Random, texts: dict[str, Callable[[int], Any]], constant: int) -> Question:
    text = rng.choice(list(texts))
    return Question(key=text, text=text, parameters=("a",), function=texts[text], near=constant)


LEVELS: tuple[tuple[Callable[[random.Random], Question], ...], ...] = (
    (ordered_chain,),
    (shuffled_chain, list_fold),
    (remainder, comparison),
)
"""Templates of each level, drawn alike."""
