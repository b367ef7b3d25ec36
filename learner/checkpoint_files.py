"""The trainer's part of a checkpoint: safetensors and JSON, nothing that runs when it is read.

    config.json, tokenizer files     copied from the base model
    model.safetensors                the published weights: a plain Hugging Face folder
    resume/masters.safetensors       float32 masters
    resume/optimizer.safetensors     first and second moments, update counts
    resume/trainer.json              version and hash of the published weights

What only a learner needs lies in a folder of its own: engines load every safetensors file they find
beside the model's.

Files are flushed to the disk. That a folder appears whole or not at all is up to the caller, who
adds its own files, writes aside and renames.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.files import flush

MODEL = "model.safetensors"
RESUME = "resume"
MASTERS = f"{RESUME}/masters.safetensors"
OPTIMIZER = f"{RESUME}/optimizer.safetensors"
TRAINER = f"{RESUME}/trainer.json"


class TrainerState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What trainer.json holds."""

    version: int
    """Policy version of the weights: steps taken or passed over."""
    dtype: str
    """Rollout dtype."""
    weights_hash: str
    """`hash_weights` of model.safetensors."""


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_model_files(folder: Path, dtype: str) -> dict[str, bytes]:
    """Configuration and tokenizer of a Hugging Face folder by file name, without weights.

    They are held in memory because the folder may be a checkpoint that is deleted later.

    Args:
        folder: Hugging Face folder.
        dtype: of the weights that will lie beside the configuration, which declares it.
    """
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in {".json", ".jinja", ".txt", ".model"}
        and not path.name.endswith(".index.json")
        and path.name != TRAINER
    }
    config = msgspec.json.decode(files["config.json"], type=dict[str, Any])
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    files["config.json"] = msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
    return files


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files and flush them to the disk.

    Raises:
        CheckpointError: the disk is full or a file cannot be written.
    """
    for name, data in files.items():
        try:
            (folder / name).write_bytes(data)
            flush(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be written: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors and flush them to the disk.

    Raises:
        CheckpointError: the disk is full or the file cannot be written.
    """
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})
        flush(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def read_tensors(path: Path, expected: Mapping[str, Tensor], *, partial: bool) -> dict[str, Tensor]:
    """Read a safetensors file and check names, shapes and dtypes.

    Args:
        path: file to read.
        expected: tensors of the right name, shape and dtype.
        partial: whether names may be missing.

    Raises:
        CheckpointError: unreadable, or not of the expected names, shapes and dtypes.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    unknown = sorted(tensors.keys() - expected.keys())
    missing = [] if partial else sorted(expected.keys() - tensors.keys())
    if unknown or missing:
        name = (unknown or missing)[0]
        problem = "is not of this model" if unknown else "is missing"
        raise CheckpointError(f"{path}: tensor {name!r} {problem}; resume with the same model")
    for name, tensor in tensors.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise CheckpointError(
                f"{path}: tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, expected "
                f"{want.dtype} {tuple(want.shape)}; resume with the same model"
            )
    return tensors


def write_state(folder: Path, state: TrainerState) -> None:
    """Write trainer.json; errors as in `write_files`."""
    data = msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"
    write_files(folder, {TRAINER: data})


def read_state(folder: Path) -> TrainerState:
    """Read trainer.json.

    Raises:
        CheckpointError: missing or not a trainer's state.
    """
    path = folder / TRAINER
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrainerState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: not a trainer's state: {error}") from error
