"""`headrace eval` on the real engine and jail, and its likeliest mistakes."""

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import load, to_json
from headrace.models import ensure_model
from tests.chaos.commands import HEADRACE, ROOT, WAIT_S

TASKS, SAMPLES = 6, 4


def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*HEADRACE, "eval", *arguments], capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["eval", *arguments]) == 2
    return capsys.readouterr().err


def test_without_arguments_the_checkpoint_alone_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval"])
    assert capsys.readouterr().err.endswith("arguments are required: CHECKPOINT\n")


@pytest.mark.vllm
@pytest.mark.jail
@pytest.mark.slow
def test_a_checkpoint_is_judged_as_its_run_samples_and_pass_at_k_is_what_its_rows_say(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    folder = ensure_model(run_dir / "checkpoints" / "step-000002", "tiny-llama")
    settings = [f"run.dir={run_dir}", "actors.max_model_len=256", "actors.kv_cache_bytes=67108864"]
    settings += ["sampling.max_new_tokens=6", "sampling.temperature=0.9", "domains=[{id='parity'}]"]
    (run_dir / "config.json").write_bytes(to_json(load([], [*settings, "model.dtype=float32"])))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("of an earlier evaluation")
    done = call(
        *(str(folder), "--tasks", str(TASKS), "--samples", str(SAMPLES), "--json"),
        *("--pass-at", "1", "--pass-at", "2", "--pass-at", "4", "--output", str(rows)),
        "--temperature=1.0",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    # the run's own settings, and the flag above them
    assert (result["dtype"], result["max_new_tokens"], result["temperature"]) == ("float32", 6, 1.0)
    samples = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(samples) == TASKS * SAMPLES
    assert all(0 < sample["sampled_tokens"] <= 6 for sample in samples)
    right = {
        index: [sample["success"] for sample in samples if sample["index"] == index]
        for index in range(TASKS)
    }
    (domain,) = result["domains"]
    assert (domain["domain"], domain["judged"], domain["unjudged"]) == ("parity", 24, 0)
    for rate in domain["pass_at"]:
        # by going through every choice of k samples
        choices = [
            sum(map(any, chosen)) / len(chosen)
            for flags in right.values()
            if (chosen := list(itertools.combinations(flags, rate["k"])))
        ]
        assert rate["mean"] == pytest.approx(sum(choices) / TASKS, abs=1e-12)
        assert rate["low"] <= rate["mean"] <= rate["high"]
    assert [rate["k"] for rate in domain["pass_at"]] == [1, 2, 4]
    assert "24 of 24 samples" in done.stderr


def test_a_folder_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/nowhere/model: no such folder" in refused(capsys, "/nowhere/model")


def test_a_folder_that_is_no_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not a model" in refused(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["None"]}')
    rows = tmp_path / "rows.jsonl"
    rows.write_text("of an earlier evaluation")
    done = call(str(tmp_path), "--domain", "parity", "--output", str(rows))
    assert done.returncode == 2
    assert rows.read_text() == "of an earlier evaluation", "nothing was sampled in its place"
    assert f"{tmp_path}: its tokenizer cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--domain", "paritty"], "did you mean 'parity'"),
        (["--domain", "parity:1"], "domain parity has levels 0 to 0, not 1"),
        (["--domain", "parity:x"], "the level must be a number"),
        ([], "belongs to no run: name its domains with --domain"),
        (["--pass-at", "8", "--samples", "4"], "add --samples 8 (now 4)"),
        (["--tasks", "0"], "--tasks must be at least 1"),
        (["--temperature", "0", "--domain", "parity"], "temperature must be at least 0.01"),
    ],
)
def test_a_wrong_option_is_named_with_the_remedy(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert said in refused(capsys, str(tmp_path), *arguments)


def test_a_run_without_a_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint yet" in refused(capsys, str(tmp_path))
