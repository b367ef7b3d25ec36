"""The trainer: one batch in, one optimizer step, new weights out. Synchronous and deterministic.

consumes   batches of groups, in the order of the log; it never decides what is trained
produces   weights in the rollout dtype, metrics, checkpoint files
waits for  nothing
unblocked  does not apply: the learner's process runs it in one thread beside its event loop

The same weights and the same set of trajectories give the same new weights to the bit, on one
machine with one number of threads; order of arrival, restarts and time change nothing.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from headrace.broker.records import Trajectory
from headrace.config import Learner
from headrace.errors import CheckpointError, ConfigError, TrainingError
from headrace.learner import checkpoint_files as files
from headrace.learner.advantages import turn_advantages
from headrace.learner.losses import TokenBatch, evaluate
from headrace.learner.metrics import TokenStatistics, summarize
from headrace.learner.model import DTYPES, PackedModel, load_model
from headrace.learner.optimizer import MasterAdamW
from headrace.learner.packing import MicroBatch, Sample, pack, to_sample


@dataclass(frozen=True)
class TrainGroup:
    """One informative group: its ordinal and the trajectories of its valid slots."""

    ordinal: int
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        version: policy version that the step produced.
        trained_tokens: sampled tokens that received gradient.
        staleness: trained tokens by version lag.
        metrics: deterministic numbers: those of `headrace.learner.metrics`, `loss`, `grad_norm`,
            `micro_batches` and `forward_tokens` (tokens that went through the layers).
        seconds: wall time by part: `pack`, `forward`, `backward`, `optimizer`, `total`.
    """

    version: int
    trained_tokens: int
    staleness: dict[int, int]
    metrics: dict[str, float]
    seconds: dict[str, float]


class _Stopwatch:
    """Charges the time since the last charge to a part."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._last = time.perf_counter()
        self.seconds = dict.fromkeys(("pack", "forward", "backward", "optimizer"), 0.0)

    def charge(self, part: str) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now
        self.seconds["total"] = now - self._start


class Trainer:
    """The model, its float32 masters and the optimizer."""

    def __init__(self, folder: Path, config: Learner, *, temperature: float, dtype: str) -> None:
        _configure_torch(config.threads)
        self.version = 0
        """Policy version of the current weights: steps taken or passed over."""
        self._config = config
        self._temperature = temperature
        self._dtype = dtype
        self._model: PackedModel = load_model(folder, DTYPES[dtype])
        self._model_files = files.read_model_files(folder, dtype)
        self._optimizer = MasterAdamW(dict(self._model.module.named_parameters()), config)

    @classmethod
    def load(cls, folder: Path, config: Learner, *, temperature: float, dtype: str) -> "Trainer":
        """Start from a base model at version 0.

        Args:
            folder: Hugging Face folder; it is only read.
            config: optimizer, loss and packing.
            temperature: at which every trajectory is sampled.
            dtype: rollout dtype, a key of `DTYPES`.

        Raises:
            ConfigError: the folder is not a model that can be trained packed.
        """
        return cls(folder, config, temperature=temperature, dtype=dtype)

    @classmethod
    def restore(cls, folder: Path, config: Learner, *, temperature: float, dtype: str) -> "Trainer":
        """Continue from what `save` wrote, to the bit.

        Raises:
            CheckpointError: a file is missing, corrupt, or of another model or dtype.
        """
        state = files.read_state(folder)
        if state.dtype != dtype:
            raise CheckpointError(
                f"{folder}: trained with model.dtype {state.dtype}, but this run uses {dtype}"
            )
        try:
            trainer = cls(folder, config, temperature=temperature, dtype=dtype)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        optimizer = trainer._optimizer
        optimizer.restore(
            files.read_tensors(folder / files.MASTERS, optimizer.masters, partial=False),
            files.read_tensors(folder / files.OPTIMIZER, optimizer.state_shapes(), partial=True),
        )
        trainer.version = state.version
        if trainer.weights_hash() != state.weights_hash:
            raise CheckpointError(
                f"{folder}: {files.MASTERS} does not round to the weights that {files.TRAINER} "
                "names; the checkpoint is corrupt"
            )
        return trainer

    def train(self, batch: Sequence[TrainGroup]) -> StepResult:
        """Take one optimizer step on a batch.

        Args:
            batch: informative groups in any order.

        Raises:
            TrainingError: nothing to train; a trajectory has no prompt, another temperature or
                vocabulary, or a token that is newer than the weights; or loss or gradient is not
                finite. Nothing was changed.
        """
        _configure_torch(self._config.threads)
        watch = _Stopwatch(self._model.device)
        samples = self._samples(batch)
        packs = pack(
            samples,
            token_budget=self._config.token_budget,
            share_prompts=self._config.share_prompts and not self._model.has_window,
            cost=self._model.cost,
        )
        count = sum(len(part.rows) for part in packs)
        if not count:
            raise TrainingError(f"{_names(batch)}: no sampled token to train on")
        watch.charge("pack")
        loss = 0.0
        parts = []
        try:
            for part in packs:
                value, statistics = self._accumulate(part, watch)
                loss += value / count
                parts.append(statistics)
            if not math.isfinite(loss):
                raise TrainingError(f"the loss is {loss}")
            norm = self._optimizer.step(self.version + 1, count)
        except TrainingError as error:
            self._optimizer.discard()
            raise TrainingError(f"{_names(batch)}: {error}; the weights are unchanged") from error
        self.version += 1
        tokens = _join(parts)
        watch.charge("optimizer")
        lags, counts = np.unique(tokens.lag, return_counts=True)
        return StepResult(
            version=self.version,
            trained_tokens=count,
            staleness=dict(zip(lags.tolist(), counts.tolist(), strict=True)),
            metrics={
                "loss": loss,
                "grad_norm": norm,
                "micro_batches": float(len(packs)),
                "forward_tokens": float(sum(len(part.tokens) for part in packs)),
                **summarize(tokens),
            },
            seconds=watch.seconds,
        )

    def pass_over(self) -> None:
        """Count a step that is not taken: the version rises, everything else stays."""
        self.version += 1

    def weights(self) -> dict[str, Tensor]:
        """Host copies of the weights in the rollout dtype.

        Names are those of the model's safetensors file; a head that is tied to the embedding is
        left out, as it is there.
        """
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._named().items()}

    def weights_hash(self) -> str:
        """Hash of `weights()`, see `headrace.learner.checkpoint_files.hash_weights`."""
        return files.hash_weights(self._named())

    def save(self, folder: Path) -> None:
        """Write the trainer's part of a checkpoint into a new or empty folder.

        The caller adds its own files beside it, writes aside and renames.

        Raises:
            CheckpointError: a file cannot be written.
        """
        try:
            (folder / files.RESUME).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be made: {error}") from error
        weights = self._named()
        files.write_files(folder, self._model_files)
        files.write_tensors(folder / files.MODEL, weights)
        files.write_tensors(folder / files.MASTERS, self._optimizer.masters)
        files.write_tensors(folder / files.OPTIMIZER, self._optimizer.state())
        files.write_state(
            folder,
            files.TrainerState(
                version=self.version, dtype=self._dtype, weights_hash=files.hash_weights(weights)
            ),
        )

    def _named(self) -> dict[str, Tensor]:
        """The current parameters themselves, under the names of `weights`."""
        module: Any = self._model.module
        tied = module.all_tied_weights_keys
        state = {name: t.detach() for name, t in module.state_dict().items() if name not in tied}
        named: dict[str, Tensor] = revert_weight_conversion(module, state)
        return named

    def _samples(self, batch: Sequence[TrainGroup]) -> list[Sample]:
        samples = []
        for group in batch:
            scores = [trajectory.verdict.score for trajectory in group.trajectories]
            values = turn_advantages(
                self._config.advantage,
                scores,
                [trajectory.verdict.step_scores for trajectory in group.trajectories],
                self._config.step_weight,
                shuffle=Random(group.ordinal) if self._config.shuffle_scores else None,
            )
            for trajectory, value in zip(group.trajectories, values, strict=True):
                self._check(trajectory)
                sample = to_sample(trajectory, value)
                if sample is not None:
                    samples.append(sample)
        return samples

    def _check(self, trajectory: Trajectory) -> None:
        where = f"sample {trajectory.group}.{trajectory.index}"
        if trajectory.temperature != self._temperature:
            raise TrainingError(
                f"{where}: sampled at temperature {trajectory.temperature}, but this run samples "
                f"at {self._temperature}"
            )
        tokens = trajectory.tokens.numpy()
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._model.vocabulary:
            raise TrainingError(
                f"{where}: token ids from {tokens.min()} to {tokens.max()} do not fit the "
                f"vocabulary of {self._model.vocabulary}"
            )
        newest = max((span.value for span in trajectory.versions), default=0)
        if newest > self.version:
            raise TrainingError(
                f"{where}: sampled by version {newest}, but the learner is at {self.version}"
            )

    def _accumulate(self, part: MicroBatch, watch: _Stopwatch) -> tuple[float, TokenStatistics]:
        """Forward and backward of one micro-batch; gradients of the loss sum are collected."""
        scores = self._model.score(part, self._temperature)
        device = scores.logprob.device
        terms = evaluate(
            self._config.loss,
            TokenBatch(
                logprob=scores.logprob,
                behaviour=torch.from_numpy(part.behaviour).to(device),
                proximal=scores.logprob.detach(),
                advantage=torch.from_numpy(part.advantage).to(device),
                weight=torch.ones_like(scores.logprob),
                sample=torch.from_numpy(part.sample).to(device),
            ),
        )
        value = float(terms.total.detach())
        watch.charge("forward")
        terms.total.backward()  # type: ignore[no-untyped-call]
        watch.charge("backward")
        return value, TokenStatistics(
            logprob=scores.logprob.detach().double().cpu().numpy(),
            behaviour=part.behaviour.astype(np.float64),
            entropy=scores.entropy.double().cpu().numpy(),
            truncated=terms.truncated.cpu().numpy(),
            advantage=part.advantage.astype(np.float64),
            lag=self.version - part.version,
        )


def _configure_torch(threads: int) -> None:
    """Set the number of threads, which changes sums, and refuse operations that vary by run.

    Called on every entry because OpenMP keeps the number of threads per calling thread.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # filling fresh memory only hides reads of it, and costs a pass over every buffer
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _join(parts: Sequence[TokenStatistics]) -> TokenStatistics:
    return TokenStatistics(
        logprob=np.concatenate([part.logprob for part in parts]),
        behaviour=np.concatenate([part.behaviour for part in parts]),
        entropy=np.concatenate([part.entropy for part in parts]),
        truncated=np.concatenate([part.truncated for part in parts]),
        advantage=np.concatenate([part.advantage for part in parts]),
        lag=np.concatenate([part.lag for part in parts]),
    )


def _names(batch: Sequence[TrainGroup]) -> str:
    return "batch of groups " + ", ".join(str(group.ordinal) for group in batch)
