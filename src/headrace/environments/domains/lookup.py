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
from msgspec import Struct

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
"""Score of an episode with every lookup that was needed but without the right answer."""
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
import json, os, random, sys
level, items = json.load(sys.stdin)
rng = random.Random(os.environ["SEED"] + " ".join(items))
prices = rng.sample([n for n in range(100, 1000) if n != {EXAMPLE}], len(items))
table = dict(zip(items, map(str, prices)))
if level == 2:
    table[items[0]] = "same as " + rng.choice(items[1:])
with open("prices.json", "w") as file:
    json.dump(table, file)
"""
"""Draws the prices when the episode opens; they differ. At level 2 the first item's names another
item instead."""

TOOL = """
import json, sys
item = sys.stdin.buffer.read().decode()
print(json.load(open("prices.json")).get(item, f'Error: there is no item "{item}".'), end="")
"""
"""Answers one call."""

SCORER = f"""
import json, os, re, sys
asked, calls, answer = json.load(sys.stdin)
table = json.load(open("/candidate/prices.json"))
needed = list(asked)
for item in needed:
    if table[item].startswith("same as "):
        needed.append(table[item].removeprefix("same as "))
wanted = str(max(int(table[item]) for item in needed if table[item].isdigit()))
found = [call in needed and call not in calls[:turn] for turn, call in enumerate(calls)]
right = re.findall("-?[0-9]+", answer) == [wanted]
os.write({VERDICT_FD}, json.dumps([found, len(needed), right]).encode())
"""
"""Works out which items were needed and what the answer had to be: the highest of their prices, as
the only number of the answer, compared as text."""


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
        return f"The price is {max(text for text in heard if text.isdigit())}."

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


class Marks(Struct, frozen=True, array_like=True):
    """What the scorer says of an episode."""

    found: list[bool]
    """For each turn whether it looked up a needed item for the first time."""
    needed: int
    """Items that had to be looked up."""
    right: bool
    """Whether the answer is the wanted number."""


class LookupSession:
    """One episode."""

    def __init__(self, task: Task, box: Box, *, tools: bool) -> None:
        self._task = task
        self._box = box
        self._tools = tools
        self._calls: list[str | None] = []
        """For each turn the item that was looked up, None where nothing was."""
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
        content = [self._task.level, self._task.data["items"]]
        await self._run("setup", SETUP, msgspec.json.encode(content))

    async def step(self, action: str) -> Observation:
        """See `Session`."""
        call = CALL.fullmatch(action.strip())
        if call is None and "lookup" not in action:
            self._calls.append(None)
            self._answer = action.encode("utf-8", "replace").decode()[:_ANSWER_CHARS]
            return Observation(done=True)
        self._calls.append(call[1] if call and self._tools else None)
        if not self._tools:
            self._said = NO_TOOLS
        elif call is None:
            self._said = 'Error: a call is lookup("item") and nothing else.'
        else:
            self._said = await self._run("tool", TOOL, call[1].encode("utf-8", "replace"))
        return Observation(done=False, message=self._said)

    async def verdict(self) -> Verdict:
        """See `Session`.

        Step scores: a turn that looks up a needed item for the first time has that lookup's part of
        `PARTIAL`, every other turn 0, and the last one the score of the episode.
        """
        if not self._calls:
            raise EnvironmentFailure("no_answer", "the episode was judged before its first turn")
        marks = await self._marks()
        part = PARTIAL / marks.needed
        looked_up = sum(marks.found) == marks.needed
        success = looked_up and marks.right
        score = 1.0 if success else part * sum(marks.found)
        kind, evidence = ("", "") if success else self._failure(looked_up)
        return Verdict(
            score=score,
            success=success,
            step_scores=[part * found for found in marks.found[:-1]] + [score],
            checks=[
                Check(name="looked_up", passed=looked_up),
                Check(name="answer", passed=marks.right),
            ],
            side="model" if kind else "",
            kind=kind,
            evidence=evidence,
        )

    async def close(self) -> None:
        """See `Session`."""
        await self._box.close()

    async def _marks(self) -> Marks:
        played = [self._task.data["asked"], self._calls, self._answer or ""]
        written = await self._box.score(SCORER, stdin=msgspec.json.encode(played))
        try:
            marks = msgspec.json.decode(written, type=Marks)
        except msgspec.DecodeError as error:
            raise EnvironmentFailure("bad_verdict", f"{written[:40]!r}: {error}") from error
        if len(marks.found) != len(self._calls) or marks.needed < 1:
            raise EnvironmentFailure("bad_verdict", f"the scorer wrote {written[:40]!r}")
        return marks

    def _failure(self, looked_up: bool) -> tuple[str, str]:
        """Class and evidence."""
        if self._answer is None:
            return "no_answer", f"the last turn was told {self._said[:80]!r}"
        shown = f"{' and '.join(self._task.data['asked'])}: got {self._answer[:80]!r}"
        return ("wrong_answer" if looked_up else "not_looked_up"), shown

    async def _run(self, purpose: str, program: str, stdin: bytes) -> str:
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
