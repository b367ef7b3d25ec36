"""Small integers: sums of two digits and the largest of three, scored in the jail."""

import random
from collections.abc import Sequence

from headrace.environments.answer import AnswerSession
from headrace.environments.generate import draw
from headrace.environments.jailed import VERDICT_FD, Box
from headrace.environments.protocol import Message, Session, Task
from headrace.sandbox.spec import SandboxSpec

SPEC = SandboxSpec(toolchain="python", disk=1 << 20, files=16)

SCORER = f"""
import os, sys
question, _, answer = sys.stdin.buffer.read().partition(b"\\n")
operation, *numbers = question.split()
wanted = {{b"sum": sum, b"largest": max}}[operation](map(int, numbers))
words = bytes(c if c in b"-0123456789" else 32 for c in answer).split()
last = [word.rstrip(b"-") for word in words if word.rstrip(b"-")][-1:] or [b""]
os.write({VERDICT_FD}, b"1" if last[0] == b"%d" % wanted else b"0")
"""
"""Works the answer out itself; the last number of the model's is compared as text and never
evaluated."""


class Arithmetic:
    """Sums of two numbers and the largest of three, of one digit (level 0) or two (level 1)."""

    id = "arithmetic"
    levels = 2

    def task(self, index: int, *, split: str, level: int) -> Task:
        """See `Domain`."""
        operation, numbers = draw(
            self.id,
            lambda rng: _make(rng, level),
            level=level,
            levels=self.levels,
            split=split,
            index=index,
        )
        if operation == "sum":
            asked = f"What is {numbers[0]} + {numbers[1]}?"
        else:
            asked = "Which number is the largest: {}, {} and {}?".format(*numbers)
        return Task(
            domain=self.id,
            level=level,
            split=split,
            index=index,
            messages=[
                Message(role="system", content="Answer the question briefly."),
                Message(role="user", content=asked),
            ],
            data={"operation": operation, "numbers": numbers},
            max_new_tokens=24,
        )

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        """See `Domain`."""
        numbers = task.data["numbers"]
        return str(sum(numbers) if task.data["operation"] == "sum" else max(numbers))

    async def open(self, task: Task, *, seed: int) -> Session:
        """See `Domain`."""
        question = " ".join([task.data["operation"], *map(str, task.data["numbers"])])
        return AnswerSession(
            await Box.open(SPEC), program=SCORER, question=question, hint=f"wanted the {question}"
        )


def _make(rng: random.Random, level: int) -> tuple[str, tuple[str, list[int]]]:
    largest = 9 if level == 0 else 99
    if rng.random() < 0.5:
        operation, numbers = "sum", [rng.randint(1, largest) for _ in range(2)]
    else:
        operation, numbers = "largest", rng.sample(range(1, largest + 1), 3)
    # neither operation depends on the order of its numbers
    return f"{operation} {sorted(numbers)}", (operation, numbers)
