"""Episodes on the real engine and in the real jail, with a tiny random model."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.actor.chat import ChatFormat
from headrace.actor.engine import Engine
from headrace.actor.episode import EpisodeResult, Limits, run_episode
from headrace.broker.host_weights import HostWeights
from headrace.broker.records import ROLE_SAMPLED, check_trajectory
from headrace.clock import SystemClock
from headrace.environments.protocol import Message
from headrace.environments.registry import get_domain
from headrace.models import ensure_model

pytestmark = [pytest.mark.vllm, pytest.mark.jail, pytest.mark.slow]

TEMPERATURE = 0.7


async def episodes(engine: Engine, chat: ChatFormat, name: str, count: int) -> list[EpisodeResult]:
    domain = get_domain(name)
    limits = Limits(max_new_tokens=64, max_model_len=1024, deadline_s=120.0)
    return await asyncio.gather(
        *[
            run_episode(
                engine,
                chat,
                domain,
                domain.task(number // 8, split="train", level=0),
                seed=number,
                temperature=TEMPERATURE,
                limits=limits,
                request_id=f"{name}-{number}",
                clock=SystemClock(),
            )
            for number in range(count)
        ]
    )


def forward_logprobs(model: torch.nn.Module, result: EpisodeResult) -> list[float]:
    """Log-probabilities of the sampled tokens, from one forward over the recorded ids."""
    with torch.no_grad():
        logits = model(torch.tensor([result.tokens])).logits[0].double() / TEMPERATURE
    every = torch.log_softmax(logits, dim=-1)
    return [
        float(every[position - 1, result.tokens[position]])
        for span in result.roles
        if span.value == ROLE_SAMPLED
        for position in range(span.start, span.end)
    ]


async def test_recorded_ids_and_logprobs_are_the_models_own_over_several_turns(
    tmp_path: Path,
) -> None:
    folder = ensure_model(tmp_path / "tiny", "tiny-llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = ChatFormat(tokenizer)
    engine = await Engine.start(
        folder, dtype="float32", max_model_len=1024, kv_cache_bytes=64 << 20, threads=1
    )
    try:
        weights = HostWeights.of(load_file(folder / "model.safetensors"), torch.float32)
        await engine.apply(weights, version=5)
        parity = await episodes(engine, chat, "parity", 32)
        python = await episodes(engine, chat, "python_functions", 4)
    finally:
        await engine.close()

    assert 0.2 < sum(result.verdict.success for result in parity) / len(parity) < 0.8
    assert all(len(result.turns) == 2 for result in python)
    assert all(result.executions[0].purpose == "tool" for result in python)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for result in [*parity[:4], *python]:
        record = result.trajectory(group=0, index=0, attempt=1, actor="a", lineage=1, queue_s=0.0)
        check_trajectory(record)
        assert {span.value for span in result.versions} == {5}
        expected = forward_logprobs(reference, result)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


async def test_the_ids_of_a_whole_conversation_are_what_its_template_gives(tmp_path: Path) -> None:
    chat = ChatFormat(AutoTokenizer.from_pretrained(ensure_model(tmp_path / "tiny", "tiny-llama")))
    asked = [Message(role="system", content="s"), Message(role="user", content="f(a): a\nb")]
    answered = [
        *asked,
        Message(role="assistant", content="def f(a):\n    return a"),
        Message(role="user", content="  SyntaxError: <x>\n\n"),
    ]
    whole = chat.prompt(answered)
    answer = whole[len(chat.prompt(asked)) :]
    answer = answer[: answer.index(chat.end_of_turn)]
    assert chat.action(answer) == answered[2].content
    reply = chat.reply(answered[3].content)
    assert whole == [*chat.prompt(asked), *answer, chat.end_of_turn, *reply]
