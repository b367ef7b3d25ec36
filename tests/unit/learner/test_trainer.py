import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.broker.records import Array, encode
from headrace.config import Learner
from headrace.configlosses import GRPO, DecoupledPPO, TruncatedIS
from headrace.errors import CheckpointError, TrainingError
from headrace.learner import checkpoint_files as files
from headrace.learner.packing import pack, to_sample
from headrace.learner.trainer import Trainer, TrainGroup
from headrace.report.page import _charts
from headrace.report.samples import History

PROMPTS = ([5, 9, 3, 8, 1, 44, 20], [2, 60, 7], [11, 12, 13, 14, 15])
TEMPERATURE = 0.7
FAST = Learner(lr=1e-2, betas=[0.9, 0.95], weight_decay=0.01, token_budget=500)


@pytest.fixture
def make_batch(make_trajectory):
    def make(first: int, version: int = 0) -> list[TrainGroup]:
        groups = []
        for ordinal in range(first, first + 3):
            prompt = PROMPTS[ordinal % 3]
            lengths = ((4, 2), (9,), (1,), (5, 3))
            groups.append(
                TrainGroup(
                    ordinal,
                    [
                        make_trajectory(
                            ordinal, i, prompt, *turns, score=float(i % 2), version=version
                        )
                        for i, turns in enumerate(lengths)
                    ],
                )
            )
        return groups

    return make


def trainer_of(folder: Path, config: Learner = FAST, dtype: str = "bfloat16") -> Trainer:
    return Trainer.load(folder, config, temperature=TEMPERATURE, dtype=dtype)


def advantage_of_better_samples(trainer: Trainer, batch: list[TrainGroup]) -> float:
    """Mean log-probability of the tokens with a positive advantage, minus that of the others."""
    means = []
    for score in (1.0, 0.0):
        samples = [
            to_sample(t, [0.0] * len(t.verdict.step_scores))
            for g in batch
            for t in g.trajectories
            if t.verdict.score == score
        ]
        (part,) = pack(
            [s for s in samples if s is not None],
            token_budget=999,
            share_prompts=False,
            cost=trainer._model.cost,
        )
        means.append(trainer._model.score(part, TEMPERATURE).logprob.mean().item())
    return means[0] - means[1]


def test_steps_raise_the_better_samples_over_the_worse(make_model, make_batch):
    trainer = trainer_of(make_model(), dtype="float32")
    margins = [advantage_of_better_samples(trainer, make_batch(0))]
    for _ in range(4):
        trainer.train(make_batch(0))
        margins.append(advantage_of_better_samples(trainer, make_batch(0)))
    assert trainer.version == 4
    assert margins == sorted(margins)


def test_shuffled_scores_train_like_scores_that_were_recorded_in_that_order(make_model, make_batch):
    batch = make_batch(0)
    permuted = []
    for group in batch:
        scores = [t.verdict.score for t in group.trajectories]
        Random(group.ordinal).shuffle(scores)
        pairs = zip(group.trajectories, scores, strict=True)
        recorded = [replace(t, verdict=replace(t.verdict, score=score)) for t, score in pairs]
        permuted.append(TrainGroup(group.ordinal, recorded))
    plain = trainer_of(make_model())
    control = trainer_of(make_model(), replace(FAST, shuffle_scores=True))
    plain.train(permuted)
    control.train(batch)
    assert control.weights_hash() == plain.weights_hash()


def test_step_scores_count_by_their_weight(make_model, make_batch):
    batch = make_batch(0)
    for group in batch:
        last = group.trajectories[-1]
        verdict = replace(last.verdict, step_scores=[0.25, 0.5])
        group.trajectories[-1] = replace(last, verdict=verdict)
    losses = set()
    for weight in (0.0, 0.5, 1.0):
        trainer = trainer_of(make_model(), replace(FAST, step_weight=weight), "float32")
        losses.add(trainer.train(batch).metrics["loss"])
    assert len(losses) == 3


def test_the_order_of_arrival_changes_nothing_to_the_bit(make_model, make_batch):
    hashes = set()
    for reverse in (False, True):
        trainer = trainer_of(make_model())
        batch = make_batch(0)
        if reverse:
            batch = [TrainGroup(g.ordinal, g.trajectories[::-1]) for g in batch[::-1]]
        trainer.train(batch)
        hashes.add(trainer.weights_hash())
    assert len(hashes) == 1


@pytest.mark.parametrize("loss", [TruncatedIS(), DecoupledPPO(), GRPO()])
def test_neither_sharing_nor_the_token_budget_changes_the_step(make_model, make_batch, loss):
    results = []
    for share, budget in ((True, 500), (False, 500), (True, 25), (False, 1)):
        config = Learner(loss=loss, share_prompts=share, token_budget=budget)
        trainer = trainer_of(make_model(), config, "float32")
        results.append(trainer.train(make_batch(0)).metrics)
    assert len({metrics["micro_batches"] for metrics in results}) == 3
    for metrics in results[1:]:
        for name in metrics.keys() - {"micro_batches", "forward_tokens"}:
            assert metrics[name] == pytest.approx(results[0][name], rel=1e-4, abs=1e-6), name


def test_the_loss_is_normalised_by_all_trained_tokens_of_the_batch(make_model, make_batch):
    """Doubling a batch by an equal group changes neither loss nor gradient norm."""
    one, two = make_batch(0)[:1], make_batch(0)[:1]
    twin = [replace(t, group=7) for t in two[0].trajectories]
    single = trainer_of(make_model(), dtype="float32").train(one)
    double = trainer_of(make_model(), dtype="float32").train([*two, TrainGroup(7, twin)])
    assert double.trained_tokens == 2 * single.trained_tokens
    for name in ("loss", "grad_norm", "kl", "entropy", "ess"):
        assert double.metrics[name] == pytest.approx(single.metrics[name], rel=1e-5)


def test_masters_keep_what_rounding_hides(make_model, make_batch):
    """At a rate below half a rounding step the published weights move only in the long run."""
    config = Learner(lr=2e-5, clip_grad=1.0)
    trainer = trainer_of(make_model(), config)
    first = trainer.weights()
    trainer.train(make_batch(0))
    moved = sum(int((first[n] != t).sum()) for n, t in trainer.weights().items())
    total = sum(t.numel() for t in first.values())
    assert moved < 0.2 * total
    masters = trainer._optimizer.masters
    assert all(torch.equal(masters[n].bfloat16(), t) for n, t in trainer.weights().items())
    assert any(not torch.equal(masters[n], t.float()) for n, t in trainer.weights().items())


def test_the_gradient_is_clipped_to_the_norm(make_model, make_batch):
    """The first step of AdamW hides a factor, so the moments are looked at."""
    norms = {}
    for clip in (1e9, 1e-3):
        trainer = trainer_of(make_model(), Learner(clip_grad=clip), "float32")
        metrics = trainer.train(make_batch(0)).metrics
        moments = [t for n, t in trainer._optimizer.state().items() if n.endswith("exp_avg")]
        norms[clip] = torch.stack([m.norm() for m in moments]).norm().item() / 0.1
        assert norms[clip] == pytest.approx(min(metrics["grad_norm"], clip), rel=1e-3)
    assert norms[1e-3] < norms[1e9]


def test_the_learning_rate_warms_up(make_model, make_batch):
    moved = []
    for warmup in (0, 10):
        trainer = trainer_of(make_model(), Learner(lr=1e-3, warmup_steps=warmup), "float32")
        before = trainer.weights()
        trainer.train(make_batch(0))
        moved.append(sum((before[n] - t).abs().sum().item() for n, t in trainer.weights().items()))
    assert moved[1] == pytest.approx(0.1 * moved[0], rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_published_names_are_those_of_the_safetensors_file(make_model, tied):
    folder = make_model(tied=tied)
    weights = trainer_of(folder, dtype="float32").weights()
    stored = load_file(folder / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert ("lm_head.weight" in weights) is not tied
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def test_published_weights_are_copies(make_model, make_batch):
    trainer = trainer_of(make_model())
    weights = trainer.weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    trainer.train(make_batch(0))
    assert all(torch.equal(before[name], weights[name]) for name in weights)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_save_and_restore_continue_to_the_bit(make_model, make_batch, tmp_path, dtype):
    straight = trainer_of(make_model(), dtype=dtype)
    for k in range(4):
        straight.train(make_batch(3 * k, k))
    interrupted = trainer_of(make_model(), dtype=dtype)
    for k in range(2):
        interrupted.train(make_batch(3 * k, k))
    interrupted.save(tmp_path / "checkpoint")
    resumed = Trainer.restore(tmp_path / "checkpoint", FAST, temperature=TEMPERATURE, dtype=dtype)
    assert resumed.version == 2
    metrics = [resumed.train(make_batch(3 * k, k)).metrics for k in (2, 3)]
    assert resumed.weights_hash() == straight.weights_hash()
    assert all(
        torch.equal(resumed._optimizer.masters[name], master)
        for name, master in straight._optimizer.masters.items()
    )
    assert metrics[-1]["grad_norm"] > 0


def test_a_step_that_is_passed_over_survives_a_restart(make_model, make_batch, tmp_path):
    straight, interrupted = trainer_of(make_model()), trainer_of(make_model())
    for trainer in (straight, interrupted):
        trainer.train(make_batch(0))
        before = trainer.weights_hash()
        trainer.pass_over()
        assert trainer.version == 2
        assert trainer.weights_hash() == before
    interrupted.save(tmp_path)
    resumed = Trainer.restore(tmp_path, FAST, temperature=TEMPERATURE, dtype="bfloat16")
    for trainer in (straight, resumed):
        trainer.train(make_batch(3, 2))
    assert resumed.version == 3
    assert resumed.weights_hash() == straight.weights_hash()


def test_a_checkpoint_before_the_first_step_restores(make_model, make_batch, tmp_path):
    trainer = trainer_of(make_model())
    trainer.save(tmp_path)
    resumed = Trainer.restore(tmp_path, FAST, temperature=TEMPERATURE, dtype="bfloat16")
    for each in (trainer, resumed):
        each.train(make_batch(0))
    assert trainer.weights_hash() == resumed.weights_hash()


def test_a_checkpoint_is_a_plain_hugging_face_folder(make_model, make_batch, tmp_path):
    trainer = trainer_of(make_model())
    trainer.train(make_batch(0))
    trainer.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    for name, tensor in trainer.weights().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert (tmp_path / "tokenizer_config.json").is_file()


def test_a_base_folder_that_vanished_is_not_missed(make_model, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    trainer_of(make_model()).save(first)
    trainer = Trainer.restore(first, FAST, temperature=TEMPERATURE, dtype="bfloat16")
    shutil.rmtree(first)
    trainer.save(second)
    Trainer.restore(second, FAST, temperature=TEMPERATURE, dtype="bfloat16")


def test_a_changed_byte_of_a_checkpoint_is_found(make_model, make_batch, tmp_path):
    trainer = trainer_of(make_model())
    trainer.train(make_batch(0))
    trainer.save(tmp_path)
    path = tmp_path / files.MASTERS
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="corrupt"):
        Trainer.restore(tmp_path, FAST, temperature=TEMPERATURE, dtype="bfloat16")


@pytest.mark.parametrize("name", [files.MODEL, files.MASTERS, files.OPTIMIZER, files.TRAINER])
def test_a_cut_checkpoint_file_is_refused_by_name(make_model, make_batch, tmp_path, name):
    trainer = trainer_of(make_model())
    trainer.train(make_batch(0))
    trainer.save(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=name):
        Trainer.restore(tmp_path, FAST, temperature=TEMPERATURE, dtype="bfloat16")


def test_a_checkpoint_of_another_dtype_is_refused(make_model, tmp_path):
    trainer_of(make_model()).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.dtype bfloat16"):
        Trainer.restore(tmp_path, FAST, temperature=TEMPERATURE, dtype="float32")


def test_the_report_draws_its_curves_from_what_a_step_reports(make_model, make_batch):
    metrics = trainer_of(make_model()).train(make_batch(0)).metrics
    row = {"step": 1.0, "time": 1.0, **metrics}
    drawn = {chart.title: chart.svg for chart in _charts(History(), [row], 1) if chart.svg}
    # the others rest on samples, which this history lacks
    assert list(drawn) == [
        "Entropy of the learner", "Staleness", "Lag of all trained tokens",
        "Sampler and learner: log-probability", "Sampler and learner: KL",
        "Effective sample size", "Truncated ratios", "Gradient norm",
    ]  # fmt: skip
    assert "lag 0: " in drawn["Sampler and learner: log-probability"]
    assert "all trained tokens: " in drawn["Sampler and learner: log-probability"]


def test_metrics_are_split_by_version_lag(make_model, make_batch):
    trainer = trainer_of(make_model())
    for k in range(2):
        trainer.train(make_batch(3 * k, 0))
    result = trainer.train(make_batch(6, 2))
    # single turns and last turns are of version 2, first turns of version 1
    assert result.staleness == {0: 3 * (2 + 9 + 1 + 3), 1: 3 * (4 + 5)}
    metrics = result.metrics
    assert metrics["tokens"] == metrics["lag0/tokens"] + metrics["lag1/tokens"] == 72
    for name in ("entropy", "kl", "ess", "ratio_mean", "logprob_diff_mean", "truncated_fraction"):
        parts = [metrics[f"lag{lag}/{name}"] for lag in (0, 1)]
        if name != "ess":
            assert min(parts) <= metrics[name] <= max(parts)
    assert metrics["ratio_max"] == max(metrics["lag0/ratio_max"], metrics["lag1/ratio_max"])
    assert 0 < metrics["ess"] <= 1
    assert set(result.seconds) == {"pack", "forward", "backward", "optimizer", "total"}


def test_on_policy_tokens_have_ratio_one(make_model, make_batch):
    """With the learner's own log-probabilities as the sampler's, every divergence is 0."""
    trainer = trainer_of(make_model(), dtype="float32")
    model = trainer._model
    groups = []
    for group in make_batch(0):
        own = []
        for trajectory in group.trajectories:
            sample = to_sample(trajectory, [0.0] * len(trajectory.verdict.step_scores))
            assert sample is not None
            (part,) = pack([sample], token_budget=99, share_prompts=False, cost=model.cost)
            logprobs = model.score(part, TEMPERATURE).logprob.detach().numpy()
            own.append(replace(trajectory, logprobs=Array.of("float32", logprobs)))
        groups.append(TrainGroup(group.ordinal, own))
    metrics = trainer.train(groups).metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["logprob_diff_max"] < 1e-4
    assert metrics["truncated_fraction"] == 0.0


def test_a_batch_that_is_not_finite_leaves_everything_as_it_was(make_model, make_batch):
    trainer, untouched = trainer_of(make_model()), trainer_of(make_model())
    batch = make_batch(0)
    bad = batch[1].trajectories[0]
    logprobs = bad.logprobs.numpy().copy()
    logprobs[0] = float("nan")
    batch[1].trajectories[0] = replace(bad, logprobs=Array.of("float32", logprobs))
    with pytest.raises(TrainingError, match=r"groups 0, 1, 2: .*weights are unchanged"):
        trainer.train(batch)
    assert trainer.version == 0
    for each in (trainer, untouched):
        each.train(make_batch(3))
    assert trainer.weights_hash() == untouched.weights_hash()


def test_trajectories_that_do_not_belong_are_refused(make_model, make_batch):
    trainer = trainer_of(make_model())

    def changed(**fields):
        batch = make_batch(0)
        batch[0].trajectories[2] = replace(batch[0].trajectories[2], **fields)
        return batch

    with pytest.raises(TrainingError, match=r"sample 0\.2: sampled at temperature 0\.9"):
        trainer.train(changed(temperature=0.9))
    with pytest.raises(TrainingError, match=r"sample 0\.2: .* vocabulary of 61"):
        trainer.train(changed(tokens=Array.of("int32", [5, 9, 3, 8, 1, 44, 20, 61])))
    with pytest.raises(TrainingError, match="version 3, but the learner is at 0"):
        trainer.train(make_batch(0, version=3))
    with pytest.raises(TrainingError, match="no sampled token"):
        trainer.train([])


SCRIPT = """
import sys
from pathlib import Path
from headrace.broker.records import Trajectory, decode
from headrace.config import Learner
from headrace.learner.trainer import Trainer, TrainGroup

folder, data = Path(sys.argv[1]), Path(sys.argv[2])
samples = [decode(p.read_bytes(), Trajectory, where=p.name) for p in sorted(data.iterdir())]
groups = [TrainGroup(g, [s for s in samples if s.group == g]) for g in range(3)]
trainer = Trainer.load(folder, Learner(lr=1e-2), temperature=0.7, dtype="bfloat16")
for _ in range(2):
    trainer.train(groups)
print(trainer.weights_hash())
"""


@pytest.mark.slow
def test_another_process_makes_the_same_weights(make_model, make_batch, tmp_path):
    for group in make_batch(0):
        for trajectory in group.trajectories:
            (tmp_path / f"{trajectory.group}.{trajectory.index}").write_bytes(encode(trajectory))
    command = [sys.executable, "-P", "-c", SCRIPT, str(make_model()), str(tmp_path)]
    theirs = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    trainer = trainer_of(make_model(), Learner(lr=1e-2))
    for _ in range(2):
        trainer.train(make_batch(0))
    assert theirs == trainer.weights_hash()
