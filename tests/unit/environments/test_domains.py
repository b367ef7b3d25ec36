"""Task generation of every domain that stands by itself, without a jail."""

import subprocess
import sys

import pytest

from headrace.environments.domains.python_functions import extract_code
from headrace.environments.generate import draw, split_of
from headrace.environments.protocol import Domain, Task
from headrace.environments.registry import domain_ids, get_domain
from headrace.errors import ConfigError

DOMAINS = [get_domain(ident) for ident in domain_ids() if "." not in ident]
CASES = [(domain, level) for domain in DOMAINS for level in range(domain.levels)]
IDS = [f"{domain.id}-{level}" for domain, level in CASES]


def content(task: Task) -> str:
    """What the model is asked, without regard to the order of commuting operands."""
    asked = task.messages[-1].content
    if task.domain == "arithmetic":
        return f"{task.data['operation']} {sorted(task.data['numbers'])}"
    return asked


@pytest.mark.parametrize(("domain", "level"), CASES, ids=IDS)
def test_train_and_heldout_never_share_a_task(domain: Domain, level: int) -> None:
    train = {content(domain.task(i, split="train", level=level)) for i in range(1500)}
    heldout = {content(domain.task(i, split="heldout", level=level)) for i in range(500)}
    assert heldout
    assert not train & heldout


def test_no_level_leaks_a_heldout_task_into_another_levels_training() -> None:
    for domain in DOMAINS:
        train, heldout = (
            {
                content(domain.task(i, split=split, level=level))
                for level in range(domain.levels)
                for i in range(400)
            }
            for split in ("train", "heldout")
        )
        assert not train & heldout


@pytest.mark.parametrize(("domain", "level"), CASES, ids=IDS)
def test_a_task_is_the_same_in_every_process(domain: Domain, level: int) -> None:
    program = (
        "from headrace.environments.registry import get_domain\n"
        f"print(get_domain({domain.id!r}).task(17, split='heldout', level={level}).ref.hash)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == domain.task(17, split="heldout", level=level).ref.hash


@pytest.mark.parametrize("domain", DOMAINS, ids=[domain.id for domain in DOMAINS])
def test_tasks_differ_by_index(domain: Domain) -> None:
    hashes = {domain.task(i, split="train", level=0).ref.hash for i in range(40)}
    assert len(hashes) == 40


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"split": "test", "level": 0, "index": 0}, "split 'test'"),
        ({"split": "train", "level": 9, "index": 0}, "level 9"),
        ({"split": "train", "level": -1, "index": 0}, "level -1"),
        ({"split": "train", "level": 0, "index": -1}, "index -1"),
    ],
)
def test_a_task_that_does_not_exist_is_named(arguments: dict[str, object], named: str) -> None:
    for domain in DOMAINS:
        with pytest.raises(ConfigError, match=named):
            domain.task(**arguments)  # type: ignore[arg-type]


def test_a_content_belongs_to_one_split_whatever_the_level() -> None:
    shares = [split_of("any", str(number)) for number in range(2000)]
    assert 0.15 < shares.count("heldout") / len(shares) < 0.25


def test_a_domain_without_heldout_content_says_so() -> None:
    key = next(str(n) for n in range(99) if split_of("one", str(n)) == "train")
    with pytest.raises(ConfigError, match="no content of split"):
        draw("one", lambda rng: (key, 0), level=0, levels=1, split="heldout", index=0)


def test_domains_are_found_by_entry_point_and_made_once() -> None:
    assert {"arithmetic", "parity", "python_functions"} <= set(domain_ids())
    assert get_domain("parity") is get_domain("parity")


def test_an_unknown_domain_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'python_functions'"):
        get_domain("python_function")


def test_listing_domains_imports_families_and_none_of_the_domains() -> None:
    program = (
        "import sys; from headrace.environments.registry import domain_ids; domain_ids()\n"
        "prefix = 'headrace.environments.domains.'\n"
        "names = [name for name in sys.modules if name.startswith(prefix)]\n"
        "print([name for name in names if not name.startswith(prefix + 'reasoning_gym')])"
    )
    listed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert listed.stdout.strip() == "[]"


def test_python_questions_do_not_accept_a_constant_answer() -> None:
    domain = get_domain("python_functions")
    for level in range(domain.levels):
        for index in range(200):
            expected = domain.task(index, split="train", level=level).data["expected"]
            assert len(set(expected[1:])) > 1


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("def f(a): return a", "def f(a): return a"),
        ("Sure:\n```python\ndef f(a):\n    return a\n```\nbye", "def f(a):\n    return a"),
        ("```\nx = 1", "x = 1"),
        ("", ""),
        ("```python\n```", ""),
    ],
)
def test_code_is_the_first_fenced_block_or_everything(action: str, code: str) -> None:
    assert extract_code(action) == code
