"""Prices that exist in the jail alone and are found by calling a tool.

When an episode opens, a program in its jail draws the prices of a few items and writes them to the
workspace. Neither the task nor the prompt holds them, and every episode has others, so that nothing
can be learnt but to call the tool, to read what it says, and to answer. A scorer in a fresh jail
reads the same file: what was asked for, which calls found it and whether the answer is right are
decided there.
"""

import random
import re
from collections.abc import Sequence

import msgspec

from headrace.broker.records import Check, Execution, Verdict
from headrace.environments.domains.lookup_items import FIRST, SECOND
from headrace.environments.generate import draw, split_of
from headrace.environments.jailed import PYTHON, VERDICT_FD, Box
from headrace.environments.protocol import (
    EnvironmentFailure,
    Message,
    Observation,
    Session,
    Task,
)
from headrace.sandbox.spec import Limits, SandboxSpec

ITEMS = 4
"""Items that have a price in one episode; at most two of them matter."""
PARTIAL = 0.3
"""Score of a wrong answer after every lookup that was needed."""
CALL = re.compile(r'lookup\("([^"\n]{1,60})"\)')
"""A turn is a call when this is all of it."""
NO_TOOLS = "There are no tools."
EXAMPLE = "731"
"""Price in the prompt's example, which no item has."""
_ANSWER_CHARS = 4096

SPEC = SandboxSpec(toolchain="python", disk=1 << 20, files=16)
LIMITS = Limits(wall_s=20.0, memory=128 << 20, processes=8, output=16 << 10)
"""Far above what the programs need: exceeding them is the environment's failure."""

SETUP = f"""
import os, random, sys
level, *items = sys.stdin.read().split("\\n")
rng = random.Random(os.environ["SEED"] + " ".join(items))
prices = rng.sample([str(n) for n in range(100, 1000) if n != {EXAMPLE}], len(items))
if level == "2":
    prices[0] = "same as " + rng.choice(items[1:])
with open("prices", "w") as file:
    file.writelines(map("%s\\t%s\\n".__mod__, zip(items, prices)))
"""
"""Draws the prices when the episode opens; they differ. At level 2 the first item's names another
item instead."""

TOOL = """
import sys
item = sys.stdin.buffer.read().decode()
table = dict(line[:-1].split("\\t") for line in open("prices"))
sys.stdout.buffer.write(table.get(item, f'Error: there is no item "{item}".').encode())
"""
"""Answers one call."""

SCORER = f"""
import os, sys
asked, count, *rest = sys.stdin.buffer.read().decode().split("\\n")
calls, answer = rest[:int(count)], " ".join(rest[int(count):])
table = dict(line[:-1].split("\\t") for line in open("/candidate/prices"))
needed = asked.split(", ")
for item in needed:
    if table[item].startswith("same as "):
        needed.append(table[item].removeprefix("same as "))
wanted = str(max(int(table[item]) for item in needed if table[item].isdigit()))
found = [call in needed and call not in calls[:turn] for turn, call in enumerate(calls)]
numbers = "".join(c if c in "-0123456789" else " " for c in answer).split()
right = [number for number in numbers if number.strip("-")] == [wanted]
marks = "".join("01"[mark] for mark in found)
os.write({VERDICT_FD}, f"{{marks}} {{len(needed)}} {{right:d}}".encode())
"""
"""Works out which items were needed and what the answer had to be: the highest of their prices, as
the only number of the answer, compared as text. Writes a digit for each turn (1 where it looked up
a needed item for the first time), how many were needed, and 1 where the answer is right."""

_MARKS = re.compile("([01]+) ([1-9]) ([01])")


class Lookup:
    """Prices to be looked up with a tool: one, the higher of two, or one that names another."""

    id = "lookup"
    levels = 3

    def __init__(self, tools: bool = True) -> None:
        """Without `tools` every call is refused and nothing can be found."""
        self._tools = tools

    def task(self, index: int, *, split: str, level: int) -> Task:
        """See `Domain`."""
        items = draw(self.id, _items, level=level, levels=self.levels, split=split, index=index)
        asked = items[:2] if level == 1 else items[:1]
        return Task(
            domain=self.id,
            level=level,
            split=split,
            index=index,
            messages=[
                Message(role="system", content="Look up prices."),
                *_EXAMPLES[level],
                Message(role="user", content=_question(asked)),
            ],
            data={"items": items, "asked": asked},
            max_turns=3 if level == 0 else 4,
            max_new_tokens=24,
        )

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        """See `Domain`."""
        named = [text.removeprefix("same as ") for text in heard if text.startswith("same as ")]
        needed = [*task.data["asked"], *named]
        if len(heard) < len(needed):
            return f'lookup("{needed[len(heard)]}")'
        return f"The price is {max(int(text) for text in heard if text.isdigit())}."

    async def open(self, task: Task, *, seed: int) -> Session:
        """See `Domain`."""
        box = await Box.open(msgspec.structs.replace(SPEC, seed=seed % 2**32))
        session = LookupSession(task, box, tools=self._tools)
        try:
            await session.draw()
        except BaseException:
            await box.close()
            raise
        return session


class LookupSession:
    """One episode."""

    setup = SETUP
    tool = TOOL
    scorer = SCORER

    def __init__(self, task: Task, box: Box, *, tools: bool) -> None:
        self._task = task
        self._box = box
        self._tools = tools
        self._calls: list[str] = []
        """For each turn the item that was looked up, empty where nothing was."""
        self._answer: str | None = None
        self._said = ""

    @property
    def executions(self) -> list[Execution]:
        """See `Session`."""
        return self._box.executions

    async def draw(self) -> None:
        """Draw the prices, in the jail.

        Raises:
            EnvironmentFailure: the sandbox or the program failed.
        """
        await self._run("setup", self.setup, [str(self._task.level), *self._task.data["items"]])

    async def step(self, action: str) -> Observation:
        """See `Session`."""
        action = action.encode("utf-8", "replace").decode()
        call = CALL.fullmatch(action.strip())
        if call is None and "lookup" not in action:
            self._calls.append("")
            self._answer = action[:_ANSWER_CHARS]
            return Observation(done=True)
        self._calls.append(call[1] if call and self._tools else "")
        if not self._tools:
            self._said = NO_TOOLS
        elif call is None:
            self._said = 'Error: a call is lookup("item") and nothing else.'
        else:
            self._said = await self._run("tool", self.tool, [call[1]])
        return Observation(done=False, message=self._said)

    async def verdict(self) -> Verdict:
        """See `Session`.

        Step scores: a turn that looks up a needed item for the first time has that lookup's part of
        `PARTIAL`, every other turn 0, and the last one the score of the episode.
        """
        if not self._calls:
            raise EnvironmentFailure("no_answer", "the episode was judged before its first turn")
        found, needed, right = await self._marks()
        part = PARTIAL / needed
        looked_up = sum(found) == needed
        success = looked_up and right
        # nothing for calls alone: they would teach to call for ever and never to answer
        score = 1.0 if success else part * sum(found) if self._answer is not None else 0.0
        kind, evidence = ("", "") if success else self._failure(looked_up)
        return Verdict(
            score=score,
            success=success,
            step_scores=[part * mark for mark in found[:-1]] + [score],
            checks=[
                Check(name="looked_up", passed=looked_up),
                Check(name="answer", passed=right),
            ],
            side="model" if kind else "",
            kind=kind,
            evidence=evidence,
        )

    async def close(self) -> None:
        """See `Session`."""
        await self._box.close()

    async def _marks(self) -> tuple[list[bool], int, bool]:
        """What the scorer found: first lookups by turn, needed items, a right answer."""
        asked = ", ".join(self._task.data["asked"])
        played = [asked, str(len(self._calls)), *self._calls, self._answer or ""]
        written = await self._box.score(self.scorer, stdin="\n".join(played).encode())
        marks = _MARKS.fullmatch(written)
        if marks is None or len(marks[1]) != len(self._calls):
            raise EnvironmentFailure("bad_verdict", f"the scorer wrote {written[:40]!r}")
        return [mark == "1" for mark in marks[1]], int(marks[2]), marks[3] == "1"

    def _failure(self, looked_up: bool) -> tuple[str, str]:
        """Class and evidence."""
        if self._answer is None:
            return "no_answer", f"the last turn was told {self._said[:80]!r}"
        shown = f"{' and '.join(self._task.data['asked'])}: got {self._answer[:80]!r}"
        return ("wrong_answer" if looked_up else "not_looked_up"), shown

    async def _run(self, purpose: str, program: str, lines: list[str]) -> str:
        stdin = "\n".join(lines).encode()
        result = await self._box.run(purpose, [*PYTHON, program], stdin=stdin, limits=LIMITS)
        if result.status != "ok":
            last = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise EnvironmentFailure(
                "tool_error", f"the {purpose} program ended with {result.status}: {last}"
            )
        return result.stdout.decode("utf-8", "replace")


def _question(items: Sequence[str]) -> str:
    if len(items) == 1:
        return f"What is the price of the {items[0]}?"
    return f"What is the higher price, {items[0]} or {items[1]}?"


def _example(items: Sequence[str], *turns: tuple[str, str]) -> list[Message]:
    """A question about items, the lookups of (item, what the tool says), and the answer."""
    messages = [Message(role="user", content=_question(items))]
    for item, said in turns:
        messages.append(Message(role="assistant", content=f'lookup("{item}")'))
        messages.append(Message(role="user", content=said))
    return [*messages, Message(role="assistant", content=f"The price is {EXAMPLE}.")]


_EXAMPLES = (
    _example(["red apple"], ("red apple", EXAMPLE)),
    _example(["red apple", "big egg"], ("red apple", EXAMPLE), ("big egg", "264")),
    _example(["red apple"], ("red apple", "same as big egg"), ("big egg", EXAMPLE)),
)
"""Of each level. Their items are in no task."""


def _items(rng: random.Random) -> tuple[str, list[str]]:
    """Distinct items, all of the first one's split: a held-out item is in no training task."""
    items = [_item(rng)]
    split = split_of(Lookup.id, items[0])
    while len(items) < ITEMS:
        item = _item(rng)
        if item not in items and split_of(Lookup.id, item) == split:
            items.append(item)
    return items[0], items


def _item(rng: random.Random) -> str:
    return f"{rng.choice(FIRST)} {rng.choice(SECOND)}"
