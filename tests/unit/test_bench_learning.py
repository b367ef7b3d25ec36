"""The benchmark's sums: what it prints of stored rows, without a run."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from headrace.config import load
from headrace.monitor.progress import Summary, write_summary

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "learning.py"


@pytest.fixture
def learning(tmp_path: Path, monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_learning", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROWS", tmp_path / "rows.jsonl")
    return module


def row(arm: str, seed: int, before: int, after: int) -> str:
    curve = [[step, step / 10] for step in range(1, 5)]
    rates = {"before": {"d": [before, 20]}, "after": {"d": [after, 20]}, "curves": {"d": curve}}
    return json.dumps({"arm": arm, "seed": seed, **rates}) + "\n"


def test_the_newest_row_of_an_arm_and_seed_counts(learning: ModuleType):
    learning.ROWS.write_text(row("η = 2", 1, 5, 6) + row("η = 0", 1, 5, 9) + row("η = 2", 1, 5, 19))
    runs = learning.stored()
    assert [(run.arm, run.after["d"].ok) for run in runs] == [("η = 0", 9), ("η = 2", 19)]


def test_gains_over_seeds_have_students_interval(learning: ModuleType):
    # mean 0.3, standard deviation 0.1, t of two degrees of freedom 4.303: half width 0.2484
    assert learning.students([0.2, 0.3, 0.4]) == pytest.approx((0.0516, 0.5484), abs=1e-4)


def test_more_seeds_than_the_table_of_t_still_have_an_interval(learning: ModuleType):
    low, high = learning.students([0.1 * (k % 2) for k in range(20)])
    assert 0.0 < low < 0.05 < high < 0.1


def test_the_table_shows_every_seed_and_does_not_pool_their_answers(learning: ModuleType):
    rows = [row("η = 2", 1, 5, 15), row("η = 2", 2, 5, 13), row("η = 2", 3, 5, 17)]
    learning.ROWS.write_text("".join(rows))
    *_, line = learning.table(learning.stored()).splitlines()
    # shares of 20 answers: 60 independent ones would give 16-37 and 63-84; gains as above
    assert line == "| η = 2 | d | 25 (11-47) | 75 (53-89) | +50, +40, +60 | +50 (+25 to +75) |"


def test_one_seed_has_the_interval_of_its_own_two_rates(learning: ModuleType):
    learning.ROWS.write_text(row("η = 2", 1, 5, 15))
    *_, line = learning.table(learning.stored()).splitlines()
    assert line == "| η = 2 | d | 25 (11-47) | 75 (53-89) | +50 | +50 (+19 to +70) |"


def test_a_run_that_was_complete_before_is_not_stored_again(
    learning: ModuleType, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    stored: list[int] = []

    def train(_file: Path, overrides: list[str]) -> None:
        folder = Path(load([learning.FILE], overrides).run.dir)
        folder.mkdir(parents=True)
        write_summary(folder, Summary(run="r", version=1, steps=1))

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learning, "row", lambda _arm, seed, _finished: seed)
    monkeypatch.setattr(learning, "store", lambda _script, row: stored.append(row))
    for seed in (1, 2, 1):
        learning.measure("η = 2", seed)
    assert stored == [1, 2]


def test_the_plot_is_one_image_that_names_every_arm(learning: ModuleType):
    arms = list(learning.ARMS)
    learning.ROWS.write_text("".join(row(arm, 1, 5, 15) for arm in arms))
    picture = learning.plot(learning.stored())
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert {"d", *arms} <= set(texts)
