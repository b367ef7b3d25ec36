"""The engine on real vLLM with a tiny model: the weights that arrive are the ones that sample."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actor.engine import Engine, Generation
from headrace.broker.host_weights import HostWeights
from headrace.errors import ConfigError, EngineError
from headrace.models import ensure_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPT = list(range(40, 60))
TOLERANCE = 1e-4
EOS = 258


async def start(model: Path) -> Engine:
    return await Engine.start(
        model,
        dtype="float32",
        max_model_len=1024,
        kv_cache_bytes=64 << 20,
        threads=1,
        max_num_seqs=16,
    )


def engine_pid() -> int:
    """The child process that is vLLM's engine core."""
    lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    names = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in " ".join(lists).split()}
    pids = [pid for pid, name in names.items() if "EngineCore" in name]
    assert len(pids) == 1
    return pids[0]


class Oracle:
    """The same model in transformers; every `step` changes all of its weights."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=self._generator)
                parameter.add_(noise * parameter.std() * 0.1)

    def weights(self) -> HostWeights:
        return HostWeights.of(dict(self.model.named_parameters()))

    def difference(self, prompt: list[int], made: Generation, temperature: float) -> float:
        """Largest difference to the engine's log-probabilities."""
        ids = torch.tensor([prompt + made.tokens])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        return float((expected - torch.tensor(made.logprobs)).abs().max())


async def sample(
    engine: Engine, request_id: str, *, count: int = 40, temperature: float = 1.0, seed: int = 0
) -> Generation:
    return await engine.generate(
        PROMPT,
        max_new_tokens=count,
        temperature=temperature,
        seed=seed,
        stop_token_ids=[],
        request_id=request_id,
    )


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-llama-tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[Engine]:
    engine = await start(folder)
    yield engine
    await engine.close()


async def test_the_engine_samples_from_exactly_the_weights_that_were_applied(
    folder: Path, engine: Engine
) -> None:
    oracle = Oracle(folder)
    for version in range(4):
        weights = oracle.weights()
        await engine.apply(weights, version=version)
        weights.flat.zero_()  # the engine keeps nothing of the memory that it was given
        assert engine.version == version
        hot = await sample(engine, f"hot{version}", temperature=1.0)
        cold = await sample(engine, f"cold{version}", temperature=0.7)
        assert oracle.difference(PROMPT, hot, 1.0) < TOLERANCE
        assert oracle.difference(PROMPT, cold, 0.7) < TOLERANCE
        assert [(s.value, s.start, s.end) for s in cold.versions] == [(version, 0, 40)]
        assert cold.stop == "length"
        oracle.step()
        assert oracle.difference(PROMPT, hot, 1.0) > 100 * TOLERANCE, "old ones would show"

    # Requests of the first version are still running when the next one arrives.
    running = [asyncio.create_task(sample(engine, f"r{i}", count=900, seed=i)) for i in range(8)]
    await asyncio.sleep(0)
    first = asyncio.create_task(sample(engine, "probe", count=2))
    await first
    report = await engine.apply(oracle.weights(), version=9)
    assert 0 < report.apply_s < report.pause_s
    crossed = 0
    for made in await asyncio.gather(*running):
        values = [span.value for span in made.versions]
        assert values in ([3], [3, 9]), "versions only rise"
        assert made.versions[0].start == 0
        assert made.versions[-1].end == len(made.tokens)
        if len(made.versions) == 2:
            crossed += 1
            assert made.versions[0].end == made.versions[1].start
    assert crossed == 8, "they were all in the middle when the version came"

    await check_requests(engine)
    if folder.name == "tiny-llama":
        await check_death(engine)
    else:
        await check_wrong_weights(engine, oracle)


async def check_requests(engine: Engine) -> None:
    again = await sample(engine, "s1", seed=5), await sample(engine, "s2", seed=5)
    assert again[0] == again[1], "the seed decides"
    token = again[0].tokens[10]
    stopped = await engine.generate(
        PROMPT, max_new_tokens=40, temperature=1.0, seed=5, stop_token_ids=[token], request_id="s3"
    )
    assert stopped.stop == "stop"
    assert stopped.tokens == again[0].tokens[: again[0].tokens.index(token) + 1]
    assert len(stopped.logprobs) == len(stopped.tokens)
    with pytest.raises(EngineError, match="1024 tokens does not fit"):
        await engine.generate(
            [1] * 1024, max_new_tokens=1, temperature=1.0, seed=0, stop_token_ids=[], request_id="l"
        )
    with pytest.raises(EngineError, match="temperature"):
        await sample(engine, "cold", temperature=0.001)
    cancelled = asyncio.create_task(sample(engine, "c", count=900))
    await sample(engine, "s4")
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def check_death(engine: Engine) -> None:
    running = asyncio.create_task(sample(engine, "last", count=900))
    await sample(engine, "before", count=2)
    os.kill(engine_pid(), signal.SIGKILL)
    with pytest.raises(EngineError, match="process died"):
        await asyncio.wait_for(running, 60)
    with pytest.raises(EngineError, match="can no longer serve"):
        await sample(engine, "after")


async def check_wrong_weights(engine: Engine, oracle: Oracle) -> None:
    parts = dict(oracle.model.named_parameters())
    del parts["model.norm.weight"]
    with pytest.raises(EngineError, match=r"do not fit .*model\.norm\.weight"):
        await engine.apply(HostWeights.of(parts), version=10)
    with pytest.raises(EngineError, match="can no longer serve"):
        await sample(engine, "after")


async def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        await start(tmp_path)
