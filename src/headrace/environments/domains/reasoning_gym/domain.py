"""Domains `reasoning_gym.<dataset>`; the scorers run in the jail, on an entry made again there."""

import importlib.util
import json
import random
import tomllib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec import Struct

from headrace.broker.records import Check, Execution, Verdict
from headrace.environments.domains.reasoning_gym.scorer import digest, make
from headrace.environments.generate import draw
from headrace.environments.jailed import Box
from headrace.environments.protocol import EnvironmentFailure, Message, Observation, Session, Task
from headrace.errors import ConfigError
from headrace.sandbox.spec import Limits, SandboxSpec

NAME = "reasoning_gym"
LIMITS = Limits(wall_s=120.0, memory=512 << 20, processes=8, output=64 << 10)
"""Of the whole scorer, far above what it needs; the answer's own limit is one of CPU time."""
SPEC = SandboxSpec(toolchain="reasoning", disk=1 << 20, files=16, limits=LIMITS)
ANSWER_BYTES = 64 << 10
"""Longer answers are cut."""
THINKING_TOKENS = 256
"""Budget besides the answer, which gets a token for each of its characters."""
INSTRUCTIONS = (
    "Answer the question. You may think first. Then give the answer alone between <answer> and "
    "</answer>, in the form that the question asks for."
)

_HERE = Path(__file__)
_SCORER = _HERE.with_name("scorer.py").read_text()


class Dataset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One dataset of the library that qualifies."""

    module: str
    """Where it is defined, below `reasoning_gym`."""
    levels: int
    """Its own configuration, and the global levels of its curriculum from 1 on that qualify."""
    alphabet: str = "(?s).*"
    """Answers that are handed to the scorer. Some scorers evaluate the answer as an expression:
    what could call anything is kept away from them, or an answer would write its own score."""


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    datasets: dict[str, Dataset]
    excluded: dict[str, str]
    """Datasets that do not qualify, and why."""


class Family:
    """The datasets of reasoning-gym, of which `datasets.toml` says what qualifies."""

    @property
    def missing(self) -> str:
        """What to do where the library is not installed, else an empty string."""
        installed = importlib.util.find_spec("reasoning_gym") is not None
        return "" if installed else "pip install 'headrace[reasoning]'"

    @cached_property
    def _table(self) -> _Table:
        text = _HERE.with_name("datasets.toml").read_text()
        return msgspec.convert(tomllib.loads(text), _Table)

    @property
    def excluded(self) -> dict[str, str]:
        """Datasets that are no domains, each with the reason."""
        return self._table.excluded

    def names(self) -> list[str]:
        """See `DomainFamily`."""
        return sorted(self._table.datasets)

    def domain(self, name: str) -> "ReasoningGym | None":
        """See `DomainFamily`."""
        if name in self._table.excluded:
            raise ConfigError(f"domain {NAME}.{name} is left out: {self._table.excluded[name]}")
        dataset = self._table.datasets.get(name)
        return ReasoningGym(name, dataset) if dataset else None


class ReasoningGym:
    """One dataset: level 0 is its own configuration, those above are its curriculum's."""

    def __init__(self, name: str, dataset: Dataset) -> None:
        self.id = f"{NAME}.{name}"
        self.levels = dataset.levels
        self.__doc__ = f"{dataset.module.partition('.')[0].title()}, from reasoning-gym."
        self._name = name
        self._dataset = dataset

    def task(self, index: int, *, split: str, level: int) -> Task:
        """See `Domain`."""

        def drawn(rng: random.Random) -> tuple[str, tuple[int, str, str]]:
            seed = rng.getrandbits(31)
            _, entry = make(self._name, self._dataset.module, level, seed)
            return entry["question"], (seed, entry["question"], entry["answer"])

        seed, question, answer = draw(
            self.id, drawn, level=level, levels=self.levels, split=split, index=index
        )
        return Task(
            domain=self.id,
            level=level,
            split=split,
            index=index,
            messages=[
                Message(role="system", content=INSTRUCTIONS),
                Message(role="user", content=question),
            ],
            data={"seed": seed, "answer": answer},
            max_new_tokens=THINKING_TOKENS + len(answer),
        )

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        """See `Domain`."""
        return f"<answer>{task.data['answer']}</answer>"

    async def open(self, task: Task, *, seed: int) -> Session:
        """See `Domain`."""
        question = {
            "name": self._name,
            "module": self._dataset.module,
            "alphabet": self._dataset.alphabet,
            "level": task.level,
            "seed": task.data["seed"],
            "answer": task.data["answer"],
            "digest": digest(task.messages[-1].content),
        }
        return ReasoningSession(await Box.open(SPEC), json.dumps(question))


class ReasoningSession:
    """One answer, scored by the library in the jail."""

    def __init__(self, box: Box, task: str) -> None:
        """Judge in `box`; `task` is the line that the scorer reads before the answer."""
        self._box = box
        self._task = task
        self._answer: str | None = None

    @property
    def executions(self) -> list[Execution]:
        """See `Session`."""
        return self._box.executions

    async def step(self, action: str) -> Observation:
        """See `Session`."""
        self._answer = extract(action)
        return Observation(done=True)

    async def verdict(self) -> Verdict:
        """See `Session`."""
        if self._answer is None:
            raise EnvironmentFailure("no_answer", "the episode was judged before its first turn")
        answer = self._answer.encode("utf-8", "replace")[:ANSWER_BYTES]
        stdin = self._task.encode() + b"\n" + answer
        told = await self._box.score(_SCORER, stdin=stdin, spec=SPEC)
        try:
            score = msgspec.json.decode(told, type=float | None)
        except msgspec.DecodeError as error:
            raise EnvironmentFailure("bad_verdict", f"the scorer wrote {told[:40]!r}") from error
        kind = "unparsable" if score is None else "wrong_answer" if score < 1 else ""
        return Verdict(
            score=score or 0.0,
            success=not kind,
            step_scores=[score or 0.0],
            checks=[Check(name="answer", passed=not kind)],
            side="model" if kind else "",
            kind=kind,
            evidence=f"answered {self._answer[:80]!r}" if kind else "",
        )

    async def close(self) -> None:
        """See `Session`."""
        await self._box.close()


def extract(action: str) -> str:
    """What stands after the last `<answer>`, up to `</answer>`; everything where there is none."""
    return action.rpartition("<answer>")[2].partition("</answer>")[0].strip()
