"""What a domain is: `Domain -> Task -> Session.step -> Verdict`.

A domain generates tasks deterministically, opens a session for one episode, and judges it. Domains
are trusted code, found by entry points; everything that a model wrote, and every scorer that
evaluates it, runs in the sandbox. An episode that cannot be judged (the sandbox broke, the scorer
gave no verdict, nothing was checked) raises `EnvironmentFailure`: it is retried and never becomes a
reward.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from headrace.broker.records import Execution, TaskRef, Verdict


class Message(Struct, frozen=True, kw_only=True):
    """One chat message."""

    role: str
    """`system`, `user` or `assistant`."""
    content: str


class Task(Struct, frozen=True, kw_only=True):
    """One task, generated from (domain, level, split, index) and nothing else."""

    domain: str
    level: int
    split: str
    """`train` or `heldout`; the two never share a task."""
    index: int
    messages: list[Message]
    """The prompt."""
    data: dict[str, Any]
    """What the session needs to judge; plain JSON values, never shown to the model."""
    max_turns: int = 1
    max_new_tokens: int = 64
    """Budget of sampled tokens per turn."""

    @property
    def ref(self) -> TaskRef:
        """Reference from which any process generates the same task; carries the content's hash."""
        digest = hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]
        return TaskRef(
            domain=self.domain, level=self.level, split=self.split, index=self.index, hash=digest
        )


class Observation(Struct, frozen=True, kw_only=True):
    """What a session answers to one model turn."""

    done: bool
    message: str = ""
    """Content of the next user message; unused when done."""


class EnvironmentFailure(Exception):
    """The environment's side failed; the attempt is retried and never becomes a reward.

    Attributes:
        kind: class of the failure, e.g. `scorer_error`, `sandbox_error`, `no_verdict`.
        evidence: a short text from which the cause can be found.
    """

    def __init__(self, kind: str, evidence: str) -> None:
        super().__init__(f"{kind}: {evidence}")
        self.kind = kind
        self.evidence = evidence


class Session(Protocol):
    """One episode of one task. Closed exactly once, whatever happened."""

    @property
    def executions(self) -> list[Execution]:
        """Every process that ran in the sandbox so far, in order."""

    async def step(self, action: str) -> Observation:
        """Take the model's turn (decoded text) and answer it.

        Raises:
            EnvironmentFailure: the environment broke.
        """

    async def verdict(self) -> Verdict:
        """Judge the finished episode.

        Raises:
            EnvironmentFailure: there is no verdict, or nothing was checked.
        """

    async def close(self) -> None:
        """Release everything; no process of the episode survives."""


class Domain(Protocol):
    """A family of tasks with a generator, an environment and a verifier."""

    id: str
    levels: int
    """Levels are 0 to levels - 1, harder upwards."""

    def task(self, index: int, *, split: str, level: int) -> Task:
        """Generate a task; the same arguments give the same task in every process."""

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        """A right next turn, by which `headrace domain check` proves that the task can be solved.

        Args:
            task: the task.
            heard: what the session answered to the turns so far, oldest first.
        """

    async def open(self, task: Task, *, seed: int) -> Session:
        """Start an episode.

        Raises:
            EnvironmentFailure: the environment could not be built.
        """


def check_verdict(verdict: Verdict, *, turns: int) -> None:
    """Check that a verdict may be used as a reward.

    Raises:
        EnvironmentFailure: nothing was checked, the score is no number in [0, 1], there is not one
            step score for each turn, or the model is not charged, with a class, for just what
            did not succeed.
    """
    if not verdict.checks:
        raise EnvironmentFailure("no_checks", "the verdict rests on no check")
    scores = [verdict.score, *verdict.step_scores]
    if not all(0 <= score <= 1 for score in scores):
        raise EnvironmentFailure("bad_verdict", f"scores {scores} are not all within 0 and 1")
    if len(verdict.step_scores) != turns:
        raise EnvironmentFailure(
            "bad_verdict", f"{len(verdict.step_scores)} step scores for {turns} turns"
        )
    charged = "" if verdict.success else "model"
    if verdict.side != charged or bool(verdict.kind) != bool(charged):
        raise EnvironmentFailure(
            "bad_verdict",
            f"success {verdict.success} with side {verdict.side!r} and class {verdict.kind!r}",
        )
