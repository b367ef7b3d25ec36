"""The `headrace domain` command, without a jail."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.environments import check
from headrace.environments.check import Report
from headrace.environments.protocol import Domain
from headrace.sandbox import preflight


def test_list_shows_every_domain_with_its_levels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["domain", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {"arithmetic", "parity", "python_functions"} <= set(lines)
    assert "2 levels" in lines["arithmetic"]
    assert "1 level " in lines["parity"]


def test_show_prints_tasks_with_their_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["domain", "show", "python_functions", "--level", "0", "--tasks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("->  'def f(" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["check", "arithmetics"], "did you mean 'arithmetic'"),
        (["check"], "needs the identifier of a domain"),
        (["list", "parity"], "domain list takes no identifier: `headrace domain show parity`"),
        (["check", "parity", "--level", "3"], "levels 0 to 0"),
        (["check", "parity", "--tasks", "1"], "--tasks must be at least 2"),
        (["show", "parity", "--tasks", "0"], "--tasks must be at least 1"),
    ],
)
def test_a_wrong_argument_ends_in_one_line_and_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["domain", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("problems", "code"), [([], 0), (["the oracle fails task x: got '\x1b[2J'\nno"], 1)]
)
def test_a_check_prints_what_it_found_as_text_and_fails_where_that_is_a_problem(
    problems: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def check_domain(domain: Domain, *, level: int, tasks: int) -> Report:
        return Report(tasks=tasks, oracle=tasks, hostile=20, problems=problems if level else [])

    async def proven() -> None:
        pass

    monkeypatch.setattr(check, "check_domain", check_domain)
    monkeypatch.setattr(preflight, "proven", proven)
    assert main(["domain", "check", "arithmetic", "--tasks", "2"]) == code
    shown = capsys.readouterr()
    first, second, *named = shown.out.splitlines()
    assert first.startswith("level 0  oracle 2/2  hostile answers 20  problems 0")
    assert second.startswith(f"level 1  oracle 2/2  hostile answers 20  problems {len(problems)}")
    text = r"level 1: the oracle fails task x: got '\x1b[2J'"
    assert named == ([rf"  {text}\nno"] if problems else [])
    said = f"headrace: error: domain arithmetic has 1 problems; the first: {text} no\n"
    assert shown.err == (said if problems else "")


def test_help_loads_no_domain() -> None:
    program = (
        "import sys; from headrace.cli.main import main\n"
        "try: main(['domain', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(n for n in sys.modules if n.startswith('headrace.environments')))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "hostile answers" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "[]"


def test_new_says_what_it_wrote_and_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "somewhere" / "rhymes"
    assert main(["domain", "new", "rhymes", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    written = ["pyproject.toml", "rhymes.py", "run.toml", "test_rhymes.py"]
    assert sorted(path.name for path in folder.iterdir()) == written
    assert all(f"wrote {folder / name}" in shown for name in written)
    for command in (
        f"pip install --no-build-isolation -e {folder}",
        "headrace domain show rhymes",
        "headrace domain check rhymes",
        f"headrace train {folder / 'run.toml'}",
    ):
        assert command in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["new"], "needs the identifier of a domain"),
        (["new", "my-domain"], "'my-domain' is no module name"),
        (["new", "Rhymes"], "'Rhymes' is no module name"),
        (["new", "lambda"], "no Python keyword"),
        (["new", "rhymes_"], "no '_' last"),
        (["new", "none"], "would make a class None"),
        (["new", "task"], "would make a class Task"),
        (["new", "arithmetic"], "'arithmetic' is registered already"),
        (["new", "json"], "Python imports another module by it"),
        (["new", "rhymes", "--folder", "{tmp}"], "exists already"),
        (["new", "rhymes", "--folder", "{tmp}/file/rhymes"], "cannot be written (Not a directory)"),
    ],
)
def test_a_domain_is_not_started_where_it_cannot_be(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["domain", *(text.format(tmp=tmp_path) for text in arguments)]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
