"""What `headrace eval` judges and prints; tests/integration/test_eval.py has engine and jail."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from headrace import hub
from headrace.actor.passrates import Sample, reports
from headrace.cli.eval import _find
from headrace.cli.evaluation import PLAIN_WIDTH, Evaluation, tables
from headrace.errors import ConfigError


def sample(index: int, number: int, success: bool, *, side: str = "", kind: str = "") -> Sample:
    return Sample(
        domain="[d]", level=1, split="heldout", index=index, number=number, attempts=1,
        success=success, score=float(success), side=side, kind=kind, turns=["x"], max_turns=2,
        sampled_tokens=7, wall_s=1.5,
    )  # fmt: skip


def printed(samples: list[Sample], ks: list[int]) -> list[str]:
    result = Evaluation(
        model="m", dtype="float32", temperature=0.7, max_new_tokens=8, max_model_len=64,
        split="heldout", tasks=2, samples=2, seed=0, wall_s=3.0, domains=reports(samples, ks),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=PLAIN_WIDTH, markup=False, emoji=False)
    console.print(tables(result, ks), highlight=False)
    shown = console.file
    assert isinstance(shown, io.StringIO)
    return [" ".join(line.split()) for line in shown.getvalue().splitlines()]


def test_the_table_has_pass_at_each_k_with_its_interval_and_failures_by_side() -> None:
    lines = printed(
        [
            sample(0, 0, True),
            sample(0, 1, False, side="model", kind="assertion"),
            sample(1, 0, False, side="model"),
            sample(1, 1, False, side="environment", kind="sandbox_error"),
        ],
        [1, 2],
    )
    assert lines[0] == "m: heldout, 2 of each task, temperature 0.7, 3 s"
    (head,) = [line for line in lines if "domain" in line]
    assert [cell.strip() for cell in head.strip("┃").split("┃")] == [
        "domain", "tasks", "pass@1, 95 %", "pass@2, 95 %", "by turn", "score", "tokens", "seconds",
    ]  # fmt: skip
    (row,) = [line for line in lines if line.startswith("│")]
    # Wilson of 1/2 in 2 tasks; then 1 of 1, since one task alone has two judged samples
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "[d]:1", "2", "25.0 % (3-80)", "100.0 % (21-100)", "33 33 %", "0.333", "7", "1.5",
    ]  # fmt: skip
    assert lines[-2:] == ["[d]:1 model assertion 1 wrong 1", "environment sandbox_error 1"]


def test_a_domain_that_could_not_be_judged_has_no_rate() -> None:
    lost = [sample(0, n, False, side="environment", kind="sandbox_error") for n in (0, 1)]
    (row,) = [line for line in printed(lost, [1, 2]) if line.startswith("│")]
    assert [cell.strip() for cell in row.strip("│").split("│")][1:4] == ["0", "-", "-"]


def test_a_run_folder_is_its_newest_checkpoint_and_a_checkpoint_knows_its_run(
    tmp_path: Path,
) -> None:
    for version in (2, 10, 9):
        folder = tmp_path / "checkpoints" / f"step-{version:06d}"
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    newest = tmp_path / "checkpoints/step-000010"
    assert _find(str(tmp_path)) == (newest, tmp_path)
    assert _find(str(newest)) == (newest, None), "no run begins without its configuration"
    (tmp_path / "config.json").touch()
    assert _find(str(newest)) == (newest, tmp_path)


def test_a_name_of_the_hub_is_downloaded_and_a_folder_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(name: str) -> Path:
        asked.append(name)
        return tmp_path

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    assert _find("org/name@v1") == (tmp_path, None)
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "org/name/config.json").touch()
    assert _find("org/name") == (Path("org/name"), None)
    assert asked == ["org/name@v1"]
    with pytest.raises(ConfigError, match="a/b/c: no such folder; give a Hugging Face model"):
        _find("a/b/c")
