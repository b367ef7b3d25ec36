from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.models import ensure_model


def test_missing_folder_without_a_recipe_names_folder_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.*does not exist.*model\.recipe.*tiny-llama"):
        ensure_model(tmp_path / "absent", "")


def test_unknown_recipe_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiny-lama.*tiny-llama"):
        ensure_model(tmp_path / "absent", "tiny-lama")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/m cannot be made: .*name another folder"):
        ensure_model(tmp_path / "file" / "m", "tiny-llama")


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ensure_model(tmp_path, "tiny-llama")


def test_recipe_gives_the_same_weights_every_time_and_never_touches_an_existing_folder(
    tmp_path: Path,
) -> None:
    first = ensure_model(tmp_path / "a", "tiny-llama")
    second = ensure_model(tmp_path / "b", "tiny-llama")
    weights = (first / "model.safetensors").read_bytes()
    assert weights == (second / "model.safetensors").read_bytes()
    (first / "model.safetensors").write_bytes(b"changed by hand")
    ensure_model(first, "tiny-llama")
    assert (first / "model.safetensors").read_bytes() == b"changed by hand"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_tiny_tokenizer_gives_back_any_text_and_ends_turns_with_its_eos(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_model(tmp_path / "m", "tiny-llama"))
    text = "def f(a):\n    return a + 1  # größer"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 512
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.startswith("<|im_start|>user\nx<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode([tokenizer.eos_token_id, 511], skip_special_tokens=True) == ""
