"""Small integers: sums of two digits and the largest of three, scored in the jail."""

import random

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
os.write({VERDICT_FD}, b"1" if answer.strip() == b"%d" % wanted else b"0")
"""
"""Works the answer out itself; the answer is compared as text and never evaluated."""


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
            example = ("2 + 6", "8")
            asked = " + ".join(map(str, numbers))
        else:
            example = ("Largest of 4, 8, 3?", "8")
            asked = f"Largest of {', '.join(map(str, numbers))}?"
        return Task(
            domain=self.id,
            level=level,
            split=split,
            index=index,
            messages=[
                Message(role="system", content="Answer with a number."),
                Message(role="user", content=example[0]),
                Message(role="assistant", content=example[1]),
                Message(role="user", content=asked),
            ],
            data={"operation": operation, "numbers": numbers},
            max_new_tokens=8,
        )

    def oracle(self, task: Task) -> str:
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
