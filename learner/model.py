"""A Hugging Face causal language model, run over packed segments.

Attention is supplied through transformers' `AttentionInterface`: the boundaries of the segments
travel from `hidden` as keyword arguments through the model's own layers to `packed_attention`, and
are never inferred from position ids. The output head is not run as a layer: `linear_logprob` takes
the hidden rows that predict a trained token, so that no row of logits is ever held.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from headrace.errors import ConfigError
from headrace.kernels import linear_logprob, packed_attention
from headrace.learner.packing import TILE, Cost, MicroBatch

ATTENTION = "headrace_packed"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    prefix_of: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the form transformers calls it.

    Args:
        module: the attention layer.
        query: `[1, Hq, T, D]`.
        key: `[1, Hkv, T, D]`.
        value: `[1, Hkv, T, D]`.
        attention_mask: unused; boundaries are explicit.
        cu_seqlens: `[B + 1]` boundaries of the segments.
        prefix_of: `[B]` segment that is each one's prefix, or None.
        scaling: softmax scale.
        sliding_window: rows that a row sees, itself included.
        softcap: must be None.
        s_aux: must be None.

    Returns:
        `[1, T, Hq, D]`, and None for the attention weights.

    Raises:
        ValueError: the layer needs a variant of attention that packed attention does not compute.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__} caps its attention scores or has sinks")
    out = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens,
        prefix_of=prefix_of,
        scale=scaling,
        window=sliding_window,
    )
    return out[None], None


AttentionInterface.register(ATTENTION, attend)


@dataclass(frozen=True)
class Scores:
    """Of the S trained tokens of a micro-batch, float32 `[S]`, in nats."""

    logprob: Tensor
    entropy: Tensor


class PackedModel:
    """A causal language model that scores micro-batches."""

    def __init__(self, model: Any, where: str) -> None:
        self.module: nn.Module = model
        self.config: Any = model.config
        self._body: nn.Module = model.base_model
        self._head: nn.Linear = model.get_output_embeddings()
        self.vocabulary: int = self._head.weight.shape[0]
        # dropout would make the learner another policy than the sampler
        model.eval()
        self._check(where)
        self.cost = _cost(model)
        self.has_window = getattr(model.config, "sliding_window", None) is not None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._head.weight.device

    def hidden(
        self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, prefix_of: Tensor | None
    ) -> Tensor:
        """Last hidden states `[T, K]` of the packed tokens `[T]`."""
        output = self._body(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seqlens=cu_seqlens,
            prefix_of=prefix_of,
        )
        state: Tensor = output.last_hidden_state[0]
        return state

    def score(self, batch: MicroBatch, temperature: float) -> Scores:
        """Log-probability of every trained token and entropy of its distribution.

        Both are taken at the sampling temperature. Gradients flow through `logprob`.
        """
        device = self.device
        prefix_of = batch.prefix_of
        state = self.hidden(
            torch.from_numpy(batch.tokens).to(device),
            torch.from_numpy(batch.positions).to(device),
            torch.from_numpy(batch.cu_seqlens).to(device),
            None if prefix_of is None else torch.from_numpy(prefix_of).to(device),
        )
        result = linear_logprob(
            state.index_select(0, torch.from_numpy(batch.rows).to(device)),
            self._head.weight,
            torch.from_numpy(batch.targets).to(device),
            bias=self._head.bias,
            temperature=temperature,
        )
        return Scores(result.logprob.float(), result.entropy.detach().float())

    @torch.no_grad()
    def _check(self, where: str) -> None:
        """Refuse a model that ignores the boundaries, or whose head is not a plain linear layer.

        The first of two packed sequences is not a number; a layer that lets it reach the second
        mixes packed sequences.

        Raises:
            ConfigError: either holds, or a kernel does not support the model.
        """
        device = self.device
        tokens = torch.arange(11, device=device) % self.vocabulary
        embedded = self.module.get_input_embeddings()(tokens)  # type: ignore[operator]
        embedded[:5] = torch.nan
        inputs = {
            "inputs_embeds": embedded[None],
            "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]], device=device),
            "use_cache": False,
            "cu_seqlens": torch.tensor([0, 5, 11], dtype=torch.int32, device=device),
            "prefix_of": None,
        }
        name = type(self.module).__name__
        try:
            state = self._body(**inputs).last_hidden_state[0]
            logits = self.module(**inputs).logits[0]
        except ValueError as error:
            raise ConfigError(f"{where}: {name} cannot be trained: {error}") from error
        if not bool(state[5:].isfinite().all()):
            raise ConfigError(
                f"{where}: a layer of {name} mixes packed sequences (it does not use transformers' "
                "attention interface); the learner cannot train this model"
            )
        if not torch.equal(logits[5:], self._head(state)[5:]):
            raise ConfigError(
                f"{where}: {name} transforms the logits after its output head; the learner cannot "
                "train this model"
            )


def load_model(path: Path, dtype: torch.dtype) -> PackedModel:
    """Load a causal language model from a Hugging Face folder for packed training.

    Args:
        path: folder with config.json and safetensors weights.
        dtype: of parameters and forward: the one that is published.

    Raises:
        ConfigError: the folder is missing or unreadable, or the model cannot be trained packed.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: no config.json; `model.path` must be a Hugging Face folder")
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            output_loading_info=True,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except SafetensorError as error:
        raise ConfigError(
            f"{_unreadable(path)}: weights cannot be read ({error}); fetch the file again"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{path}: not a causal language model: {reason}") from error
    if report["missing_keys"]:
        raise ConfigError(f"{path}: weights of {min(report['missing_keys'])!r} are missing")
    # a build for GPUs names one even where none is to be had
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return PackedModel(model.to(device), str(path))


def _unreadable(path: Path) -> Path:
    """The first file of weights in a folder that is not one, else the folder."""
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return path


def _cost(model: Any) -> Cost:
    """FLOPs per token and per attention tile of one layer, from the model's configuration."""
    config = model.config
    embeddings = {id(p) for p in model.get_input_embeddings().parameters()}
    embeddings |= {id(p) for p in model.get_output_embeddings().parameters()}
    linear = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Cost(
        token=2.0 * linear / config.num_hidden_layers,
        tile=4.0 * TILE * TILE * width * config.num_attention_heads,
    )
