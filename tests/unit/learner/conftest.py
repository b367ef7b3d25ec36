from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.broker.records import (
    ROLE_ENVIRONMENT,
    ROLE_PROMPT,
    ROLE_SAMPLED,
    Array,
    Span,
    Trajectory,
    Verdict,
)

VOCABULARY = 61
TEMPERATURE = 0.7

MakeTrajectory = Callable[..., Trajectory]
MakeModel = Callable[..., Path]


def build_trajectory(
    group: int,
    index: int,
    prompt: list[int],
    *turns: int,
    score: float = 0.0,
    version: int = 0,
    temperature: float = TEMPERATURE,
    environment: int = 3,
) -> Trajectory:
    """Sampled turns of the given lengths, with `environment` tokens between two turns."""
    rng = np.random.default_rng((group, index, 7))
    tokens = list(prompt)
    roles = [Span(ROLE_PROMPT, 0, len(prompt))]
    versions = []
    for number, length in enumerate(turns):
        if number:
            roles.append(Span(ROLE_ENVIRONMENT, len(tokens), len(tokens) + environment))
            tokens += rng.integers(0, VOCABULARY, environment).tolist()
        roles.append(Span(ROLE_SAMPLED, len(tokens), len(tokens) + length))
        # the last turn is sampled by a newer version where there is one
        newest = version if number == len(turns) - 1 else max(version - 1, 0)
        versions.append(Span(newest, len(tokens), len(tokens) + length))
        tokens += rng.integers(0, VOCABULARY, length).tolist()
    return Trajectory(
        group=group,
        index=index,
        attempt=0,
        actor="actor",
        lineage=1,
        tokens=Array.of("int32", tokens),
        roles=roles,
        versions=versions,
        logprobs=Array.of("float32", -4.5 + rng.normal(0, 0.5, sum(turns))),
        temperature=temperature,
        verdict=Verdict(
            score=score,
            success=score > 0.5,
            step_scores=[0.0] * (len(turns) - 1) + [score] * bool(turns),
            checks=[],
        ),
        turns=[],
        executions=[],
        queue_s=0.0,
        wall_s=0.0,
    )


@pytest.fixture(scope="session")
def make_trajectory() -> MakeTrajectory:
    return build_trajectory


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Folder of a random Llama in float32, tied or not."""
    made: dict[tuple[bool, int], Path] = {}

    def make(*, tied: bool = True, layers: int = 2) -> Path:
        if (tied, layers) not in made:
            config = LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=48,
                intermediate_size=64,
                num_hidden_layers=layers,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=256,
                tie_word_embeddings=tied,
                # untrained weights this large make logits that matter
                initializer_range=0.3,
            )
            torch.manual_seed(3)
            folder = tmp_path_factory.mktemp("model")
            LlamaForCausalLM(config).save_pretrained(folder)
            (folder / "tokenizer_config.json").write_text("{}")
            made[tied, layers] = folder
        return made[tied, layers]

    return make
