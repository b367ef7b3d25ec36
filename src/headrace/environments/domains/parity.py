"""Answers whose characters add up to an even or odd number: chance gets half of them right.

It exists so that the whole loop can run on a tiny model with random weights: there is something to
sample, to judge in the jail and to train on from the first group.
"""

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
total = sum(map(ord, answer.decode("utf-8", "replace")))
right = len(answer) > 0 and total % 2 == int(question)
os.write({VERDICT_FD}, b"1" if right else b"0")
"""


class Parity:
    """Answers whose characters add up to an even or odd number; chance gets half of them."""

    id = "parity"
    levels = 1

    def task(self, index: int, *, split: str, level: int) -> Task:
        """See `Domain`."""
        word, parity = draw(
            self.id, _make, level=level, levels=self.levels, split=split, index=index
        )
        return Task(
            domain=self.id,
            level=level,
            split=split,
            index=index,
            messages=[Message(role="user", content=f"{word} {('even', 'odd')[parity]}")],
            data={"parity": parity},
            max_new_tokens=8,
        )

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        """See `Domain`."""
        return "ba"[task.data["parity"]]

    async def open(self, task: Task, *, seed: int) -> Session:
        """See `Domain`."""
        box = await Box.open(SPEC)
        return AnswerSession(box, program=SCORER, question=question(task), hint=hint(task))


def question(task: Task) -> str:
    """What the scorer is told: 0 for even, 1 for odd."""
    return str(task.data["parity"])


def hint(task: Task) -> str:
    """What a wrong answer leaves as evidence."""
    return f"expected characters with an {('even', 'odd')[task.data['parity']]} sum"


def _make(rng: random.Random) -> tuple[str, tuple[str, int]]:
    word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(4))
    return word, (word, rng.randrange(2))
