"""The benchmark's sums: what it prints of stored rows, without a run."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

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
    gains = [0.2, 0.3, 0.4]
    # mean 0.3, standard deviation 0.1, t of two degrees of freedom 4.303: half width 0.2484
    assert learning._over_seeds(gains) == "+30 (+5 to +55)"
    assert learning._over_seeds([0.2]) == "one seed"


def test_the_table_pools_the_tasks_of_all_seeds(learning: ModuleType):
    learning.ROWS.write_text("".join(row("η = 2", seed, 5, 15) for seed in (1, 2, 3)))
    *_, line = learning.table(learning.stored()).splitlines()
    assert line.startswith("| η = 2 | d | 3 | 25 % (16-37) | 75 % (63-84) | +50 (")


def test_the_plot_is_one_image_that_names_every_arm(learning: ModuleType):
    arms = list(learning.ARMS)
    learning.ROWS.write_text("".join(row(arm, 1, 5, 15) for arm in arms))
    picture = learning.plot(learning.stored())
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert {"d", *arms} <= set(texts)
