"""One episode, token-exact: prompt once, sampled ids as sampled, the environment's ids appended.

What is recorded is the very list of ids that the engine read and sampled. Token, turn and length
budgets are the model's; whatever else ends an episode early is the environment's failure, which the
caller retries and finally records as `Failed`.
"""

import asyncio
import hashlib
import logging
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from headrace.actor.chat import ChatFormat
from headrace.broker.records import (
    ROLE_ENVIRONMENT,
    ROLE_PROMPT,
    ROLE_SAMPLED,
    Array,
    Execution,
    Span,
    Trajectory,
    Turn,
    Verdict,
    check_trajectory,
)
from headrace.clock import Clock
from headrace.environments.protocol import (
    Domain,
    EnvironmentFailure,
    Session,
    Task,
    check_verdict,
)
from headrace.errors import EngineError, SandboxError, TaskError

if TYPE_CHECKING:
    from headrace.actor.engine import Generation

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CLOSE_S = 10.0


class Generator(Protocol):
    """What an episode needs of the engine."""

    async def generate(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: list[int],
        request_id: str,
    ) -> "Generation":
        """Sample one model turn after `prompt`."""


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode."""

    max_new_tokens: int
    """Sampled tokens per turn; a task may ask for fewer."""
    max_model_len: int
    """Tokens of the whole episode."""
    deadline_s: float
    """Wall-clock seconds; exceeding them is the environment's failure."""


@dataclass(frozen=True)
class EpisodeResult:
    """A judged episode: the content of a `Trajectory`. T tokens, S of them sampled."""

    tokens: list[int]
    roles: list[Span]
    versions: list[Span]
    logprobs: list[float]
    temperature: float
    verdict: Verdict
    turns: list[Turn]
    executions: list[Execution]
    wall_s: float

    def trajectory(
        self, *, group: int, index: int, attempt: int, actor: str, lineage: int, queue_s: float
    ) -> Trajectory:
        """Make the record of the sample (group, index).

        Raises:
            RecordError: the engine's spans or log-probabilities do not fit its tokens.
        """
        record = Trajectory(
            group=group,
            index=index,
            attempt=attempt,
            actor=actor,
            lineage=lineage,
            tokens=Array.of("int32", self.tokens),
            roles=self.roles,
            versions=self.versions,
            logprobs=Array.of("float32", self.logprobs),
            temperature=self.temperature,
            verdict=self.verdict,
            turns=self.turns,
            executions=self.executions,
            queue_s=queue_s,
            wall_s=self.wall_s,
        )
        check_trajectory(record)
        return record


async def run_episode(
    engine: Generator,
    chat: ChatFormat,
    domain: Domain,
    task: Task,
    *,
    seed: int,
    temperature: float,
    limits: Limits,
    request_id: str,
    clock: Clock,
) -> EpisodeResult:
    """Run one episode of a task and judge it.

    Args:
        engine: samples the model's turns.
        chat: renders messages for the engine's model.
        domain: the task's domain.
        task: the task.
        seed: of this sample; with the same weights it gives the same episode.
        temperature: of the softmax.
        limits: budgets.
        request_id: unique prefix of the engine's request names.
        clock: for durations.

    Raises:
        EnvironmentFailure: the environment broke, gave no valid verdict, or the deadline passed.
        EngineError: the engine failed.
        TaskError: the prompt leaves no room for an answer.
    """
    prompt = chat.prompt(task.messages)
    check_room(prompt, task, limits)
    episode = _Episode(engine, chat, task, seed, temperature, limits, request_id, clock, prompt)
    begun = clock.monotonic()
    try:
        async with asyncio.timeout(limits.deadline_s):
            session = await _guard(domain.open(task, seed=seed), "opening the session")
            try:
                verdict = await episode.play(session)
                executions = list(session.executions)
            except BaseException:
                # that error counts, and a cancellation must stay one
                try:
                    await _close(session)
                except EnvironmentFailure as failure:
                    logger.warning("request %s: %s", request_id, failure)
                raise
            await _close(session)
    except TimeoutError as error:
        raise EnvironmentFailure(
            "episode_deadline",
            f"no verdict within {limits.deadline_s:g} s, waiting for {episode.waiting_for}",
        ) from error
    return EpisodeResult(
        tokens=episode.tokens,
        roles=episode.roles,
        versions=episode.versions,
        logprobs=episode.logprobs,
        temperature=temperature,
        verdict=verdict,
        turns=episode.turns,
        executions=executions,
        wall_s=clock.monotonic() - begun,
    )


def check_room(prompt: list[int], task: Task, limits: Limits) -> None:
    """Refuse a prompt that leaves no room for an answer.

    Raises:
        TaskError: it is as long as the longest episode.
    """
    if len(prompt) >= limits.max_model_len:
        raise TaskError(
            f"task {task.domain}/{task.level}/{task.split}/{task.index} has a prompt of "
            f"{len(prompt)} tokens: raise actors.max_model_len above {limits.max_model_len}"
        )


class _Episode:
    """The growing token list of one episode."""

    def __init__(
        self,
        engine: Generator,
        chat: ChatFormat,
        task: Task,
        seed: int,
        temperature: float,
        limits: Limits,
        request_id: str,
        clock: Clock,
        prompt: list[int],
    ) -> None:
        self.tokens = list(prompt)
        self.roles = [Span(ROLE_PROMPT, 0, len(prompt))]
        self.versions: list[Span] = []
        self.logprobs: list[float] = []
        self.turns: list[Turn] = []
        self.waiting_for = "the environment"
        self._engine = engine
        self._chat = chat
        self._task = task
        self._seed = seed
        self._temperature = temperature
        self._limits = limits
        self._request_id = request_id
        self._clock = clock

    async def play(self, session: Session) -> Verdict:
        """Alternate model turns and environment steps until done or out of budget, then judge."""
        budget = ""
        while True:
            generation, generate_s = await self._sample()
            begun = self._clock.monotonic()
            action = self._chat.action(generation.tokens)
            observation = await _guard(session.step(action), "a step")
            self._record(generation, generate_s, self._clock.monotonic() - begun)
            if observation.done:
                break
            if len(self.turns) >= self._task.max_turns:
                budget = f"budget_turns: {self._task.max_turns} turns used"
                break
            reply = self._chat.reply(observation.message)
            if self.tokens[-1] != self._chat.end_of_turn:
                reply = [self._chat.end_of_turn, *reply]
            if len(self.tokens) + len(reply) >= self._limits.max_model_len:
                budget = (
                    f"budget_length: {len(self.tokens)} tokens and a reply of {len(reply)} leave no"
                    f" room in {self._limits.max_model_len}"
                )
                break
            self._append(reply, ROLE_ENVIRONMENT)
        verdict = await _guard(session.verdict(), "the verdict")
        check_verdict(verdict, turns=len(self.turns))
        if budget and not verdict.success:
            kind, _, evidence = budget.partition(": ")
            verdict = msgspec.structs.replace(verdict, side="model", kind=kind, evidence=evidence)
        return verdict

    async def _sample(self) -> "tuple[Generation, float]":
        turn = len(self.turns)
        room = self._limits.max_model_len - len(self.tokens)
        begun = self._clock.monotonic()
        self.waiting_for = "the engine"
        generation = await self._engine.generate(
            list(self.tokens),
            max_new_tokens=min(self._task.max_new_tokens, self._limits.max_new_tokens, room),
            temperature=self._temperature,
            seed=_turn_seed(self._seed, turn),
            stop_token_ids=self._chat.stop_token_ids,
            request_id=f"{self._request_id}.{turn}",
        )
        self.waiting_for = "the environment"
        if not generation.tokens:
            raise EngineError(f"request {self._request_id}.{turn} returned no token")
        return generation, self._clock.monotonic() - begun

    def _record(self, generation: "Generation", generate_s: float, execute_s: float) -> None:
        start = len(self.tokens)
        self._append(generation.tokens, ROLE_SAMPLED)
        self.logprobs += generation.logprobs
        self.versions += [
            Span(span.value, start + span.start, start + span.end) for span in generation.versions
        ]
        self.turns.append(
            Turn(
                start=start,
                end=len(self.tokens),
                stop=generation.stop,
                generate_s=generate_s,
                execute_s=execute_s,
            )
        )

    def _append(self, tokens: list[int], role: int) -> None:
        start = len(self.tokens)
        self.tokens += tokens
        self.roles.append(Span(role, start, len(self.tokens)))


async def _guard(call: Awaitable[T], what: str) -> T:
    """Await a domain's code; whatever it raises is the environment's failure.

    Domains are plug-ins: an error in one must cost one attempt, not the actor and every other
    episode in it.
    """
    try:
        return await call
    except EnvironmentFailure:
        raise
    except SandboxError as error:
        raise EnvironmentFailure("sandbox_error", f"{what}: {error}") from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise EnvironmentFailure(
            "domain_error",
            f"{what} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})",
        ) from error


async def _close(session: Session) -> None:
    """Close with a deadline of its own: that of the episode may have passed already."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await _guard(session.close(), "closing the session")
    except TimeoutError as error:
        raise EnvironmentFailure(
            "close_deadline", f"the session was not closed within {_CLOSE_S:g} s"
        ) from error


def _turn_seed(seed: int, turn: int) -> int:
    """Seed of one turn, below 2**32 as engines require."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:4], "big")
