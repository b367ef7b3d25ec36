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
SYMBOLS = {"plus": "+", "minus": "-", "times": "*"}
LIST_LENGTHS = (2, 5)
EXAMPLE = ("g(x, y): returns x divided by y plus 5", "def g(x, y): return x / y + 5")
LIST_EXAMPLE = ("g(v): returns the sum of the list v divided by 5", "def g(v): return sum(v) / 5")


class Question(Struct, frozen=True):
    """A function to write."""

    key: str
    """Equal for questions that differ in nothing but the order of words."""
    text: str
    """What the function returns, in words."""
    parameters: Sequence[str]
    """`v` is a list of integers, every other parameter an integer."""
    code: str
    """A Python expression that is right."""
    function: Callable[..., Any]
    """The same, for the expected values; the code above is only ever run in a jail."""
    example: tuple[str, str]
    """A question of the same kind and its answer, shown first."""
    near: int
    """A number at which the function's answers change, so that inputs lie on both sides."""

    def inputs(self, rng: random.Random, count: int) -> list[list[Any]]:
        """Draw `count` different argument lists on which not all answers are the same."""
        while True:
            drawn: list[list[Any]] = []
            while len(drawn) < count:
                values = [self._value(name, rng) for name in self.parameters]
                # equal arguments cannot tell a from b
                if values not in drawn and (len(values) == 1 or values[0] != values[1]):
                    drawn.append(values)
            # the first input is the visible one: the others must suffice on their own
            if len({repr(self.function(*values)) for values in drawn[1:]}) > 1:
                return drawn

    def _value(self, name: str, rng: random.Random) -> Any:
        if name == "v":
            return [rng.randint(-20, 99) for _ in range(rng.randint(*LIST_LENGTHS))]
        return rng.randint(-20, self.near + 40)


def ordered_chain(rng: random.Random) -> Question:
    """`a times b plus 7`: the parameters in order, then a constant is added or subtracted."""
    first, second = rng.choice(list(OPERATORS)), rng.choice(("plus", "minus"))
    return _chain(rng.randint(2, 99), first, second, [0, 1, 2])


def shuffled_chain(rng: random.Random) -> Question:
    """`7 minus b times a`: two parameters and a constant in any order, any two operators."""
    first, second = rng.choice(list(OPERATORS)), rng.choice(list(OPERATORS))
    return _chain(rng.randint(2, 99), first, second, rng.sample(range(3), 3))


def _chain(constant: int, first: str, second: str, order: list[int]) -> Question:
    items = [("a", "b", str(constant))[place] for place in order]

    def function(a: int, b: int) -> int:
        x, y, z = ((a, b, constant)[place] for place in order)
        # Python's precedence, which is also how the words are meant
        if second == "times" and first != "times":
            return OPERATORS[first](x, y * z)
        return OPERATORS[second](OPERATORS[first](x, y), z)

    return Question(
        key=f"chain {sorted((first, second))} {constant}",
        text=f"{items[0]} {first} {items[1]} {second} {items[2]}",
        parameters=("a", "b"),
        code=f"{items[0]} {SYMBOLS[first]} {items[1]} {SYMBOLS[second]} {items[2]}",
        function=function,
        example=EXAMPLE,
        near=constant,
    )


def list_fold(rng: random.Random) -> Question:
    """One number of a list, changed by a constant."""
    folds: dict[str, tuple[str, Callable[[list[int]], int]]] = {
        "the sum": ("sum(v)", sum),
        "the largest item": ("max(v)", max),
        "the smallest item": ("min(v)", min),
        "the length": ("len(v)", len),
        "the first item": ("v[0]", operator.itemgetter(0)),
        "the last item": ("v[-1]", operator.itemgetter(-1)),
    }
    name, word, constant = rng.choice(list(folds)), rng.choice(list(OPERATORS)), rng.randint(2, 20)
    code, fold = folds[name]
    text = f"{name} of the list v {word} {constant}"
    return Question(
        key=text,
        text=text,
        parameters=("v",),
        code=f"{code} {SYMBOLS[word]} {constant}",
        function=lambda v: OPERATORS[word](fold(v), constant),
        example=LIST_EXAMPLE,
        near=constant,
    )


def remainder(rng: random.Random) -> Question:
    """A remainder, or whether there is none."""
    k = rng.randint(2, 40)
    return _of_one(
        rng,
        k,
        (f"the remainder of a divided by {k}", f"a % {k}", lambda a: a % k),
        (f"whether a is divisible by {k}", f"a % {k} == 0", lambda a: a % k == 0),
    )


def comparison(rng: random.Random) -> Question:
    """Which side of a constant the argument lies on."""
    k = rng.randint(2, 99)
    return _of_one(
        rng,
        k,
        (f"whether a is greater than {k}", f"a > {k}", lambda a: a > k),
        (f"whether a is at most {k}", f"a <= {k}", lambda a: a <= k),
        (f"the larger of a and {k}", f"max(a, {k})", lambda a: max(a, k)),
        (f"the smaller of a and {k}", f"min(a, {k})", lambda a: min(a, k)),
    )


def _of_one(
    rng: random.Random, near: int, *choices: tuple[str, str, Callable[[int], Any]]
) -> Question:
    text, code, function = rng.choice(choices)
    return Question(
        key=text,
        text=text,
        parameters=("a",),
        code=code,
        function=function,
        example=EXAMPLE,
        near=near,
    )


LEVELS: tuple[tuple[Callable[[random.Random], Question], ...], ...] = (
    (remainder, ordered_chain),
    (list_fold, comparison),
    (shuffled_chain,),
)
"""Templates of each level, drawn alike; ordered by what a small untrained model can do."""
