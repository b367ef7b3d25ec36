from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headrace.errors import ConfigError
from headrace.learner.model import PackedModel, load_model
from headrace.learner.packing import Cost, MicroBatch, pack, to_sample

LINEAR = Cost(token=1.0, tile=0.0)
PROMPT = [5, 9, 3, 8, 1, 44, 20]
TEMPERATURE = 0.7


def two_groups(make_trajectory):
    trajectories = [make_trajectory(0, i, PROMPT, n) for i, n in enumerate((4, 1, 9))]
    trajectories += [make_trajectory(1, i, [2, 60, 7], 3, n) for i, n in enumerate((2, 6))]
    return trajectories


def pack_all(trajectories, *, share: bool, budget: int = 500) -> list[MicroBatch]:
    samples = [to_sample(t, [0.5 - t.index] * len(t.verdict.step_scores)) for t in trajectories]
    return pack(
        [s for s in samples if s is not None], token_budget=budget, share_prompts=share, cost=LINEAR
    )


def loss_and_gradients(model: PackedModel, batches: list[MicroBatch]):
    """Sum of advantage x log-probability over all trained tokens, and every gradient."""
    model.module.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        scores = model.score(batch, TEMPERATURE)
        part = (scores.logprob * torch.from_numpy(batch.advantage)).sum()
        part.backward()
        total += part.detach()
    gradients = {}
    for name, parameter in model.module.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.clone()
    return total, gradients


def plain_loss_and_gradients(folder: Path, trajectories):
    """The same by transformers alone: one forward a sample, full logits, float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for trajectory in trajectories:
        advantage = 0.5 - trajectory.index
        sample = to_sample(trajectory, [advantage] * len(trajectory.verdict.step_scores))
        assert sample is not None
        ids = torch.from_numpy(sample.tokens).long()
        logits = model(input_ids=ids[None]).logits[0] / TEMPERATURE
        table = torch.log_softmax(logits, -1)
        rows = torch.from_numpy(sample.sampled)
        total = total + table[rows - 1, ids[rows]].sum() * advantage
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(left, right, tolerance: float) -> None:
    (loss, gradients), (want_loss, want) = left, right
    assert loss.item() == pytest.approx(want_loss.item(), rel=tolerance, abs=tolerance)
    assert gradients.keys() == want.keys()
    for name, gradient in gradients.items():
        scale = want[name].abs().max().item()
        difference = (gradient.double() - want[name].double()).abs().max().item()
        assert difference <= tolerance * max(scale, 1e-3), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_a_packed_batch_equals_each_sample_alone(make_model, make_trajectory, tied, share):
    folder = make_model(tied=tied)
    trajectories = two_groups(make_trajectory)
    packed = loss_and_gradients(
        load_model(folder, torch.float32), pack_all(trajectories, share=share)
    )
    assert_same(packed, plain_loss_and_gradients(folder, trajectories), 1e-5)


def test_sharing_prompts_changes_no_loss_and_no_gradient(make_model, make_trajectory):
    model = load_model(make_model(), torch.float32)
    trajectories = two_groups(make_trajectory)
    shared, apart = (pack_all(trajectories, share=share) for share in (True, False))
    assert len(shared[0].tokens) < len(apart[0].tokens)
    assert_same(loss_and_gradients(model, shared), loss_and_gradients(model, apart), 1e-5)


def test_the_micro_batch_split_changes_no_loss_and_no_gradient(make_model, make_trajectory):
    model = load_model(make_model(), torch.float32)
    trajectories = two_groups(make_trajectory)
    whole = loss_and_gradients(model, pack_all(trajectories, share=True))
    for budget in (1, 18, 30):
        parts = pack_all(trajectories, share=True, budget=budget)
        assert len(parts) > 1
        assert_same(loss_and_gradients(model, parts), whole, 1e-5)


def test_positions_restart_with_every_sequence(make_model, make_trajectory):
    model = load_model(make_model(), torch.float32)
    target = make_trajectory(1, 0, PROMPT, 6)
    alone = model.score(pack_all([target], share=True)[0], TEMPERATURE).logprob
    neighbours = [make_trajectory(0, 0, PROMPT[:4], 11), target]
    (both,) = pack_all(neighbours, share=True)
    chosen = torch.from_numpy(both.sample == 1)
    after = model.score(both, TEMPERATURE).logprob[chosen]
    torch.testing.assert_close(after, alone, rtol=1e-5, atol=1e-6)


def test_a_neighbour_changes_nothing_to_the_bit(make_model, make_trajectory):
    model = load_model(make_model(), torch.float32)
    target = make_trajectory(1, 0, PROMPT, 6)
    results = []
    for prompt in (PROMPT[:4], PROMPT[1:5]):
        (both,) = pack_all([make_trajectory(0, 0, prompt, 11), target], share=True)
        chosen = torch.from_numpy(both.sample == 1)
        results.append(model.score(both, TEMPERATURE).logprob[chosen])
    assert torch.equal(*results)


def test_the_temperature_divides_the_logits(make_model, make_trajectory):
    model = load_model(make_model(), torch.float32)
    (batch,) = pack_all([make_trajectory(0, 0, PROMPT, 6)], share=True)
    hot, cold = (model.score(batch, temperature) for temperature in (5.0, 0.2))
    assert bool((hot.entropy > cold.entropy).all())


def test_entropy_carries_no_gradient(make_model, make_trajectory):
    model = load_model(make_model(), torch.float32)
    (batch,) = pack_all([make_trajectory(0, 0, PROMPT, 6)], share=True)
    assert not model.score(batch, TEMPERATURE).entropy.requires_grad


def test_prompt_and_environment_tokens_get_no_gradient_of_their_own(make_model, make_trajectory):
    """The loss depends on which tokens were sampled, and not on predicting any other."""
    (batch,) = pack_all([make_trajectory(0, 0, PROMPT, 2, 3)], share=True)
    trained = set(batch.rows.tolist())
    model = load_model(make_model(tied=False), torch.float32)
    state = model.hidden(
        torch.from_numpy(batch.tokens),
        torch.from_numpy(batch.positions),
        torch.from_numpy(batch.cu_seqlens),
        None,
    ).detach()
    loss_and_gradients(model, [batch])
    head = model.module.get_output_embeddings()  # type: ignore[operator]
    want = torch.zeros_like(head.weight)
    logits = state @ head.weight.detach().T / TEMPERATURE
    for row, target, advantage in zip(batch.rows, batch.targets, batch.advantage, strict=True):
        slope = -torch.softmax(logits[row], -1)
        slope[target] += 1
        want += float(advantage) * slope[:, None] * state[row] / TEMPERATURE
    assert len(trained) == 5
    torch.testing.assert_close(head.weight.grad, want, rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_near_float32(make_model, make_trajectory):
    (batch,) = pack_all(two_groups(make_trajectory), share=True)
    wide = load_model(make_model(), torch.float32).score(batch, TEMPERATURE).logprob
    narrow = load_model(make_model(), torch.bfloat16).score(batch, TEMPERATURE).logprob
    assert narrow.dtype == torch.float32
    assert (narrow - wide).abs().mean().item() < 0.1


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, torch.float32)


def test_missing_weights_are_refused(make_model, tmp_path: Path):
    source = make_model()
    weights = load_file(source / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' are missing"):
        load_model(tmp_path, torch.float32)


def test_a_pointer_to_weights_that_were_not_fetched_is_refused(make_model, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((make_model() / "config.json").read_bytes())
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ConfigError, match=r"model\.safetensors: weights cannot be read .*again"):
        load_model(tmp_path, torch.float32)


def test_a_build_for_a_device_that_is_not_there_trains_on_the_cpu(make_model, monkeypatch):
    def absent(*, check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("meta")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", absent)
    loaded = load_model(make_model(), torch.float32)
    assert {parameter.device.type for parameter in loaded.module.parameters()} == {"cpu"}


def test_a_model_that_mixes_packed_sequences_is_refused(tmp_path: Path):
    config = MambaConfig(
        vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1, use_mambapy=False
    )
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot train this model"):
        load_model(tmp_path, torch.float32)


SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "query norm": lambda: Qwen3Config(**SIZES),
    "scaled embedding": lambda: GemmaConfig(**SIZES),
    "learned positions": lambda: GPT2Config(
        vocab_size=61, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_architectures_equal_each_sample_alone(make_trajectory, tmp_path: Path, family: str):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    trajectories = two_groups(make_trajectory)
    # a window ends at the segment, so a model with one never shares prompts
    assert model.has_window is (family == "window")
    packed = loss_and_gradients(model, pack_all(trajectories, share=not model.has_window))
    assert_same(packed, plain_loss_and_gradients(tmp_path, trajectories), 2e-5)


def test_a_mixture_of_experts_is_no_mixture_of_sequences(make_trajectory, tmp_path: Path):
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    apart = loss_and_gradients(model, pack_all(two_groups(make_trajectory), share=False, budget=1))
    together = loss_and_gradients(model, pack_all(two_groups(make_trajectory), share=True))
    assert_same(together, apart, 2e-5)


def test_a_model_with_capped_attention_is_refused(tmp_path: Path):
    AutoModelForCausalLM.from_config(Gemma2Config(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Gemma2Attention caps its attention scores"):
        load_model(tmp_path, torch.float32)


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path):
    config = GraniteConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=4.0,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="transforms the logits"):
        load_model(tmp_path, torch.float32)


def test_the_cost_counts_the_layers_and_not_the_embeddings(make_model):
    model = load_model(make_model(tied=False), torch.float32)
    inner = [p.numel() for n, p in model.module.named_parameters() if "layers" in n or "norm" in n]
    assert model.cost.token == pytest.approx(2 * sum(inner) / 2)
    assert np.isclose(model.cost.tile, 4 * 64 * 64 * 16 * 6)
