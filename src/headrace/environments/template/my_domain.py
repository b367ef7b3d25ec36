"""What is the last letter of a word? Replace task, oracle and scorer by an idea of your own."""

import random
from collections.abc import Sequence

from headrace.environments.answer import AnswerSession
from headrace.environments.generate import draw
from headrace.environments.jailed import VERDICT_FD, Box
from headrace.environments.protocol import Message, Session, Task
from headrace.sandbox.spec import SandboxSpec

# Runs in the jail. Standard input: `question` as `open` gives it, a line feed, the model's answer.
SCORER = f"""
import os, sys
word, _, answer = sys.stdin.buffer.read().partition(b"\\n")
os.write({VERDICT_FD}, b"1" if answer.split()[-1:] == [word[-1:]] else b"0")
"""


class MyDomain:
    """The last letter of a word of 3 (level 0) or 6 letters (level 1)."""

    id = "my_domain"
    levels = 2

    def task(self, index: int, *, split: str, level: int) -> Task:
        """Make a task from these arguments and nothing else: every process makes the same."""

        def make(rng: random.Random) -> tuple[str, str]:
            word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=3 + 3 * level))
            return word, word  # a key that names the content, and the content

        word = draw(self.id, make, level=level, levels=self.levels, split=split, index=index)
        asked = f"What is the last letter of {word}? Answer with the letter alone."
        return Task(
            domain=self.id, level=level, split=split, index=index,
            messages=[Message(role="user", content=asked)], data={"word": word}, max_new_tokens=16,
        )  # fmt: skip

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        """Answer as a perfect model would."""
        return str(task.data["word"][-1])

    async def open(self, task: Task, *, seed: int) -> Session:
        """Start an episode: one answer, judged by the scorer in a fresh jail."""
        box = await Box.open(SandboxSpec(toolchain="python"))
        word = task.data["word"]
        return AnswerSession(box, program=SCORER, question=word, hint=f"wanted {word[-1]!r}")
