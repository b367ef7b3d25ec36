"""A checkpoint is a plain Hugging Face folder."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import Learner
from headrace.learner.trainer import Trainer, TrainGroup
from headrace.models import ensure_model
from tests.chaos.commands import WAIT_S
from tests.integration.learner.scripted import sample

NEW_TOKENS = 12
VLLM = f"""
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True,
          kv_cache_memory_bytes=1 << 26, block_size=32)
params = SamplingParams(temperature=0.0, max_tokens={NEW_TOKENS}, ignore_eos=True)
(out,) = llm.generate(["hello"], params, use_tqdm=False)
print("TOKENS", json.dumps(list(out.outputs[0].token_ids)))
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_transformers_and_vllm_load_a_checkpoint_and_agree(tmp_path: Path) -> None:
    base = ensure_model(tmp_path / "base", "tiny-llama")
    trainer = Trainer.load(base, Learner(lr=1e-2), temperature=1.0, dtype="float32")
    trainer.train([TrainGroup(g, [sample(g, i, 0, 1.0) for i in range(4)]) for g in (1, 2, 3)])
    trainer.save(tmp_path / "checkpoint")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    moved = [
        not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert any(moved), "the checkpoint holds trained weights"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    prompt = tokenizer("hello", return_tensors="pt")
    output = model.generate(
        **prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
    expected = output[0, prompt["input_ids"].shape[1] :].tolist()

    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-P", "-c", VLLM, str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=WAIT_S,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = [x for x in result.stdout.splitlines() if x.startswith("TOKENS")]
    assert msgspec.json.decode(line.removeprefix("TOKENS")) == expected
