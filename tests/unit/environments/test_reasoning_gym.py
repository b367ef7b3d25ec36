"""Domains of reasoning-gym: the same tasks everywhere, each in one split, and what is left out."""

import decimal
import subprocess
import sys

import pytest

from headrace.cli.main import main
from headrace.environments.domains.reasoning_gym.domain import Family, extract
from headrace.environments.generate import split_of
from headrace.environments.registry import domain_ids, get_domain
from headrace.errors import ConfigError

IDS = [ident for ident in domain_ids() if ident.startswith("reasoning_gym.")]
HASHES = """
from headrace.environments.registry import domain_ids, get_domain
for ident in domain_ids():
    if ident.startswith("reasoning_gym."):
        print(get_domain(ident).task(0, split="train", level=0).ref.hash)
"""
WITHOUT_THE_LIBRARY = """
import sys
sys.modules["reasoning_gym"] = None
from headrace.cli.main import main
raise SystemExit(main(sys.argv[1:]))
"""


def python(program: str, *args: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *args],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": hash_seed},
    )


def test_every_task_is_the_same_in_a_process_with_other_hashes_and_of_its_split() -> None:
    other = python(HASHES, hash_seed="1234")
    tasks = [get_domain(ident).task(0, split="train", level=0) for ident in IDS]
    assert other.stdout.split() == [task.ref.hash for task in tasks], other.stderr
    for task in tasks:
        assert split_of(task.domain, task.messages[-1].content) == "train"


@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "family_relationships"])
def test_no_question_is_in_both_splits_whatever_the_level(name: str) -> None:
    domain = get_domain(f"reasoning_gym.{name}")
    train, heldout = (
        {
            domain.task(index, split=split, level=level).messages[-1].content
            for level in range(domain.levels)
            for index in range(20)
        }
        for split in ("train", "heldout")
    )
    assert len(heldout) > 20
    assert not train & heldout


def test_a_dataset_changes_no_setting_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    before = decimal.getcontext().prec
    get_domain("reasoning_gym.decimal_arithmetic").task(0, split="train", level=1)
    get_domain("reasoning_gym.bf").task(0, split="train", level=1)
    assert decimal.getcontext().prec == before
    assert capsys.readouterr().out == ""


def test_a_higher_level_of_the_librarys_curriculum_asks_for_more() -> None:
    domain = get_domain("reasoning_gym.leg_counting")
    first, middle, last = (
        sum(
            domain.task(i, split="train", level=n).messages[-1].content.count(",")
            for i in range(20)
        )
        for n in (1, domain.levels // 2, domain.levels - 1)
    )
    assert 4 * first < middle < last


def test_a_dataset_that_does_not_qualify_says_why() -> None:
    assert not set(Family().excluded) & set(Family().names())
    with pytest.raises(ConfigError, match=r"puzzle24 is left out: .* any four numbers"):
        get_domain("reasoning_gym.puzzle24")
    with pytest.raises(ConfigError, match=r"did you mean 'reasoning_gym\.leg_counting'"):
        get_domain("reasoning_gym.leg_count")


def test_without_the_library_the_other_domains_are_listed_and_the_error_names_the_extra() -> None:
    listed = python(WITHOUT_THE_LIBRARY, "domain", "list")
    assert listed.returncode == 0, listed.stderr
    assert "arithmetic " in listed.stdout
    assert "reasoning_gym.leg" not in listed.stdout
    assert (
        listed.stdout.splitlines()[-1]
        == "not installed: reasoning_gym.* (pip install 'headrace[reasoning]')"
    )
    shown = python(WITHOUT_THE_LIBRARY, "domain", "show", "reasoning_gym.leg_counting")
    assert shown.returncode == 2
    assert "pip install 'headrace[reasoning]'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_list_of_domains_imports_no_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["domain", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{ident} " in printed for ident in IDS)
    loaded = python(
        "import sys; from headrace.environments.registry import all_domains; all_domains()\n"
        "print([name for name in sys.modules if name.startswith('reasoning_gym')])"
    )
    assert loaded.stdout == "[]\n", loaded.stderr


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("I think <answer>6</answer>, no: <answer>\n7\n</answer> it is", "7"),
        ("7\n", "7"),
        ("<answer>7", "7"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_the_answer_is_what_the_last_tags_hold_or_everything(action: str, answer: str) -> None:
    assert extract(action) == answer
