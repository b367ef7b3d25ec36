"""Evaluation with a scripted engine; tests/integration/test_eval.py has the real one."""

import pytest

from headrace.actor.chat import ChatFormat, load_chat
from headrace.actor.engine import Generation
from headrace.actor.episode import Limits
from headrace.actor.evaluate import Conditions, Exam, evaluate, read_weights
from headrace.actor.passrates import Sample
from headrace.broker.records import Check, Span, Verdict
from headrace.clock import SystemClock
from headrace.environments.protocol import EnvironmentFailure, Message, Observation, Task
from headrace.errors import ConfigError
from headrace.models import ensure_model

CONDITIONS = Conditions(
    temperature=1.0, limits=Limits(8, 256, 60.0), attempts=3, in_flight=4, seed=0
)


class Echo:
    """An engine that says one letter, chosen by the seed."""

    def __init__(self):
        self.seeds = []

    async def generate(self, prompt, *, seed, request_id, **_):
        self.seeds.append((request_id, seed))
        return Generation([40 + seed % 20], [-1.0], [Span(0, 0, 1)], "length")


class Flaky:
    """A domain whose environment fails a number of times for each sample of its odd tasks."""

    id = "flaky"
    levels = 1

    def __init__(self, failures):
        self.failures = failures
        self.opened = {}

    def task(self, index, *, split, level):
        asked = [Message(role="user", content=str(index))]
        return Task(domain="flaky", level=level, split=split, index=index, messages=asked, data={})

    async def open(self, task, *, seed):
        count = self.opened[seed] = self.opened.get(seed, 0) + 1
        if task.index % 2 and count <= self.failures:
            raise EnvironmentFailure("sandbox_error", "broken")
        return Session()


class Session:
    executions = ()

    async def step(self, action):
        return Observation(done=True)

    async def verdict(self):
        checks = [Check(name="one", passed=False)]
        return Verdict(
            score=0.0, success=False, step_scores=[0.0], checks=checks, side="model", kind="wrong"
        )

    async def close(self):
        pass


class NoWait(SystemClock):
    async def sleep(self, seconds):
        pass


async def run(tmp_path, domain, *, tasks=4, samples=2, engine=None):
    from transformers import AutoTokenizer

    chat = ChatFormat(AutoTokenizer.from_pretrained(ensure_model(tmp_path / "m", "tiny-llama")))
    seen: list[Sample] = []
    made = await evaluate(
        engine or Echo(),
        chat,
        [Exam(domain, [domain.task(i, split="heldout", level=0) for i in range(tasks)], samples)],
        CONDITIONS,
        NoWait(),
        seen.append,
    )
    assert sorted(seen, key=lambda s: (s.index, s.number)) == made
    return made


async def test_a_failing_environment_is_tried_again_and_then_judged(tmp_path):
    made = await run(tmp_path, Flaky(failures=2))
    assert [sample.attempts for sample in made] == [1, 1, 3, 3, 1, 1, 3, 3]
    assert {sample.side for sample in made} == {"model"}


async def test_an_environment_that_fails_on_every_attempt_is_not_charged_to_the_model(tmp_path):
    made = await run(tmp_path, Flaky(failures=3))
    odd = [sample for sample in made if sample.index % 2]
    assert {(s.side, s.kind, s.evidence, s.attempts) for s in odd} == {
        ("environment", "sandbox_error", "broken", 3)
    }
    assert not any(sample.judged for sample in odd)


async def test_a_sample_has_the_same_seed_however_many_others_there_are(tmp_path):
    few, many = Echo(), Echo()
    await run(tmp_path, Flaky(failures=0), tasks=2, samples=1, engine=few)
    await run(tmp_path, Flaky(failures=0), tasks=5, samples=3, engine=many)
    assert set(few.seeds) < set(many.seeds)
    assert len({seed for _, seed in many.seeds}) == 15


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_names_no_files_is_refused_with_its_folder(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=f"{tmp_path}: no weights in safetensors"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{}"), ("tokenizer.json", "{"), ("tokenizer_config.json", "[]")],
)
def test_a_file_that_holds_no_tokenizer_is_refused_with_its_folder(tmp_path, name, text):
    folder = ensure_model(tmp_path / "m", "tiny-llama")
    load_chat(folder)
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=f"^{folder}: its tokenizer cannot be loaded: ."):
        load_chat(folder)
