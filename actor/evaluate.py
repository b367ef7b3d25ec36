"""Judges a model as it is: episodes on its own weights, in the actor's engine and the real jails.

consumes   a Hugging Face folder and the tasks of some domains
produces   one `Sample` per sample, as they finish
waits for  the engine and the environments, each with the deadlines of an episode
unblocked  by them

What a training run samples, an evaluation samples in the same way: same rendering, same budgets,
same seeds per turn. Environment failures are retried as there and never charged to the model.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headrace.actor.chat import ChatFormat, load_chat
from headrace.actor.engine import Engine
from headrace.actor.episode import EpisodeResult, Generator, Limits, check_room, run_episode
from headrace.actor.passrates import Sample
from headrace.broker.host_weights import DTYPES, HostWeights
from headrace.broker.records import ROLE_PROMPT, ROLE_SAMPLED
from headrace.clock import Clock
from headrace.config import Actors
from headrace.environments.protocol import Domain, EnvironmentFailure, Task
from headrace.errors import ConfigError
from headrace.process import first_error
from headrace.sandbox.preflight import proven

_BACKOFF_S = 0.5
_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """File of each tensor."""


@dataclass(frozen=True)
class Exam:
    """Tasks of one domain, each sampled `samples` times."""

    domain: Domain
    tasks: Sequence[Task]
    samples: int


@dataclass(frozen=True)
class Conditions:
    """How episodes are sampled."""

    temperature: float
    limits: Limits
    attempts: int
    """Episodes that may be started for a sample whose environment fails."""
    in_flight: int
    """Episodes at the same time."""
    seed: int
    """With it the domain, level, split, task and number of a sample make its seed."""


@asynccontextmanager
async def serving(
    folder: Path, dtype: str, actors: Actors
) -> AsyncIterator[tuple[Engine, ChatFormat]]:
    """Serve a model's own weights, with its tokenizer, for the length of the block.

    Args:
        folder: Hugging Face folder with safetensors weights.
        dtype: `bfloat16`, `float16` or `float32`; the weights are cast to it.
        actors: length, cache, threads and concurrency of the engine.

    Raises:
        ConfigError: the folder is not a model with a chat template, or vLLM is not installed.
        EngineError: the engine did not come up, or the weights do not fit it.
        SandboxError: this host cannot run jails, in which everything is judged.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: name a Hugging Face model folder")
    chat = load_chat(folder)
    await proven()
    weights = HostWeights.of(read_weights(folder), DTYPES[dtype])
    engine = await Engine.start(
        folder,
        dtype=dtype,
        max_model_len=actors.max_model_len,
        kv_cache_bytes=actors.kv_cache_bytes,
        threads=actors.threads,
        max_num_seqs=actors.samples_in_flight,
    )
    try:
        await engine.apply(weights, version=0)
        del weights
        yield engine, chat
    finally:
        await engine.close()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The model's tensors by name, from one safetensors file or those that an index names.

    Raises:
        ConfigError: there are none, or a file cannot be read.
    """
    files = ["model.safetensors"]
    try:
        if (folder / _INDEX).is_file():
            index = msgspec.json.decode((folder / _INDEX).read_bytes(), type=_Index)
            files = sorted(set(index.weight_map.values()))
        tensors: dict[str, Tensor] = {}
        for name in files:
            tensors |= load_file(folder / name)
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{folder}: no weights in safetensors can be read ({error}); name a Hugging Face "
            "model folder"
        ) from error
    return tensors


async def evaluate(
    engine: Generator,
    chat: ChatFormat,
    exams: Sequence[Exam],
    conditions: Conditions,
    clock: Clock,
    on_sample: Callable[[Sample], None],
) -> list[Sample]:
    """Run every sample of the exams, `conditions.in_flight` at a time.

    Args:
        engine: samples the model's turns.
        chat: renders messages for the engine's model.
        exams: what is asked.
        conditions: how it is sampled.
        clock: for durations and the pause before another attempt.
        on_sample: called with each sample when it is finished.

    Returns:
        All samples, in the order of the exams, tasks and numbers.

    Raises:
        EngineError: the engine failed.
        TaskError: a prompt leaves no room for an answer.
    """
    for exam in exams:
        for task in exam.tasks:
            # before the first sample: in the middle it would lose the others
            check_room(chat.prompt(task.messages), task, conditions.limits)
    asked = enumerate(
        (exam, task, number)
        for exam in exams
        for task in exam.tasks
        for number in range(exam.samples)
    )
    done: dict[int, Sample] = {}

    async def work() -> None:
        for position, (exam, task, number) in asked:
            sample = await _sample(engine, chat, exam, task, number, conditions, clock)
            done[position] = sample
            on_sample(sample)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(conditions.in_flight):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return [done[position] for position in sorted(done)]


async def _sample(
    engine: Generator,
    chat: ChatFormat,
    exam: Exam,
    task: Task,
    number: int,
    conditions: Conditions,
    clock: Clock,
) -> Sample:
    name = f"{task.domain}/{task.level}/{task.split}/{task.index}/{number}"
    attempt = 1
    while True:
        try:
            result = await run_episode(
                engine,
                chat,
                exam.domain,
                task,
                seed=_seed(f"{conditions.seed}/{name}"),
                temperature=conditions.temperature,
                limits=conditions.limits,
                request_id=f"{name}.{attempt}",
                clock=clock,
            )
        except EnvironmentFailure as failure:
            if attempt < conditions.attempts:
                await clock.sleep(_BACKOFF_S * 2**attempt)
                attempt += 1
                continue
            return Sample(
                domain=task.domain,
                level=task.level,
                split=task.split,
                index=task.index,
                number=number,
                attempts=attempt,
                side="environment",
                kind=failure.kind,
                evidence=failure.evidence,
                max_turns=task.max_turns,
            )
        return _judged(result, task, number, attempt, chat)


def _judged(
    result: EpisodeResult, task: Task, number: int, attempt: int, chat: ChatFormat
) -> Sample:
    verdict = result.verdict
    return Sample(
        domain=task.domain,
        level=task.level,
        split=task.split,
        index=task.index,
        number=number,
        attempts=attempt,
        success=verdict.success,
        score=verdict.score,
        side=verdict.side,
        kind=verdict.kind,
        evidence=verdict.evidence,
        turns=[chat.action(result.tokens[turn.start : turn.end]) for turn in result.turns],
        max_turns=task.max_turns,
        prompt_tokens=_tokens(result, ROLE_PROMPT),
        sampled_tokens=_tokens(result, ROLE_SAMPLED),
        wall_s=result.wall_s,
        jail_cpu_s=sum(execution.cpu_s for execution in result.executions),
    )


def _tokens(result: EpisodeResult, role: int) -> int:
    return sum(span.end - span.start for span in result.roles if span.value == role)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
