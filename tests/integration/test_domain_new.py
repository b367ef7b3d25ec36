"""`headrace domain new` from its command to an installed package that passes its own test."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import load
from tests.chaos.commands import HEADRACE

pytestmark = [pytest.mark.jail, pytest.mark.slow]
NAME = "newcomer_words"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command wrote, installed into `target` beside it."""
    work = tmp_path_factory.mktemp("new")
    assert main(["domain", "new", NAME, "--folder", str(work / NAME)]) == 0
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", work / "target"]
    subprocess.run([*pip, *map(str, options), work / NAME], check=True, timeout=300)
    return work / NAME


def run_installed(package: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    path = f"import sys; sys.path.append({str(package.parent / 'target')!r}); "
    return subprocess.run(
        [sys.executable, "-P", "-c", path + argv[0], *argv[1:]],
        capture_output=True, text=True, timeout=300, cwd=package, check=False,
    )  # fmt: skip


def test_the_domain_passes_its_check_once_it_is_installed(package: Path) -> None:
    program = "from headrace.cli.main import main; sys.exit(main())"
    done = run_installed(package, program, "domain", "check", NAME, "--tasks", "2")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:4] for line in done.stdout.splitlines()] == [
        ["level", str(level), "oracle", "2/2"] for level in (0, 1)
    ]


def test_its_own_test_passes(package: Path) -> None:
    program = "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    done = run_installed(package, program)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_what_is_written_is_short_and_as_clean_as_the_project(package: Path) -> None:
    files = [package / name for name in (f"{NAME}.py", f"test_{NAME}.py", "pyproject.toml")]
    code = files[0].read_text()
    assert len(code.splitlines()) <= 50
    assert "class NewcomerWords:" in code
    assert not any("my_domain" in path.read_text() for path in files)
    rules = Path(__file__).resolve().parents[2] / "pyproject.toml"
    for action in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *action, "--no-cache", "--config", str(rules)]
        done = subprocess.run([*command, *files[:2]], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_its_run_file_is_a_whole_configuration_for_the_domain(package: Path) -> None:
    config = load([package / "run.toml"], [])
    assert [mix.id for mix in config.domains] == [NAME]
    assert config.model.path
    assert config.run_name == NAME


def test_without_the_package_the_domain_is_unknown(package: Path) -> None:
    done = subprocess.run(
        [*HEADRACE, "domain", "check", NAME], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"unknown domain '{NAME}'" in done.stderr
