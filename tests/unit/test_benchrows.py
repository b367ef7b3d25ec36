"""Rows of all benchmarks have one form, so that figures of different days can be compared."""

import json
import subprocess
from pathlib import Path

import pytest

from headrace.benchrows import commit, store

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))


def test_a_row_is_appended_with_where_when_and_from_what_it_was_measured(tmp_path, capsys):
    script = tmp_path / "speed.py"
    store(str(script), {"question": "a", "wall_s": 1.5})
    store(str(script), {"question": "b", "wall_s": 2.5})
    lines = (tmp_path / "results" / "speed.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["question"], row["wall_s"]) for row in rows] == [("a", 1.5), ("b", 2.5)]
    for row in rows:
        assert row["benchmark"] == "speed"
        assert row["commit"] == "unknown", "the folder is no checkout"
        assert row["time"] > 1.7e9
        assert "cores" in row["machine"]
        assert len(row["load"]) == 2
    assert json.loads(capsys.readouterr().out.split("}\n")[0] + "}") == {
        "question": "a",
        "wall_s": 1.5,
    }


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [
        ("benchmarks/results/speed.jsonl", False),
        ("docs/speed.svg", False),
        ("docs/speed.md", True),
        ("learner/new.py", True),
    ],
)
def test_what_a_benchmark_writes_is_no_change_of_what_it_measured(tmp_path, changed, dirty):
    (tmp_path / "benchmarks").mkdir()
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for arguments in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / changed).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / changed).write_text("x")
    assert commit(tmp_path / "benchmarks").endswith("-dirty") == dirty


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_row_that_is_stored_names_its_benchmark_and_commit_and_what_it_ran_on(path):
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert row["benchmark"] == path.stem
        assert len(row["commit"].removesuffix("-dirty")) >= 7
        assert "machine" in row or not row["measured"], "only arithmetic needs no machine"
