"""The `headrace` command: quick help, one-line errors, exit codes."""

import argparse
import errno
import importlib
import resource
import subprocess
import sys
import types

import pytest

from headrace.cli import main as shell
from headrace.cli.main import COMMANDS, main
from headrace.errors import BrokerError, ConfigError

HELP_LIMIT_S = 0.5
HEADRACE = [sys.executable, "-P", "-m", "headrace.cli.main"]


def children_cpu_s():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def help_seconds(*arguments):
    """Least CPU time of up to five tries, which is what a core that is free would take.

    The machine may be busy; help that waits for anything would be another defect.
    """
    tries = []
    for _ in range(5):
        start = children_cpu_s()
        done = subprocess.run([*HEADRACE, *arguments], capture_output=True, text=True, check=True)
        tries.append(children_cpu_s() - start)
        assert done.stdout.startswith("usage: headrace")
        if tries[-1] < HELP_LIMIT_S:
            break
    return min(tries)


def test_the_overview_answers_in_half_a_second_and_names_every_command(capsys):
    assert help_seconds("--help") < HELP_LIMIT_S
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_answers_in_half_a_second(name, record_property):
    seconds = help_seconds(name, "--help")
    record_property("seconds", seconds)
    assert seconds < HELP_LIMIT_S


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name):
    command = vars(importlib.import_module(COMMANDS[name][0]))
    assert command["HELP"].strip()
    command["add_arguments"](argparse.ArgumentParser())
    assert callable(command["run"])


def test_an_unknown_command_is_refused_with_the_nearest_one(capsys):
    assert main(["lerner"]) == 2
    shown = capsys.readouterr()
    assert shown.err == (
        "headrace: error: unknown command 'lerner'; did you mean 'learner'?; "
        "`headrace --help` lists them\n"
    )


def a_command(monkeypatch, run):
    """Register a command of which `run` is the body."""
    module = types.ModuleType("headrace.cli.probe")
    vars(module).update(
        HELP="A command.",
        add_arguments=lambda parser: parser.add_argument("items", nargs="*"),
        run=run,
    )
    monkeypatch.setitem(sys.modules, "headrace.cli.probe", module)
    monkeypatch.setitem(shell.COMMANDS, "probe", ("headrace.cli.probe", ""))


def raising(error):
    def run(_args):
        raise error

    return run


def test_a_command_gives_its_own_exit_code(monkeypatch):
    a_command(monkeypatch, lambda _args: 7)
    assert main(["probe"]) == 7


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("run.toml: bad"), 2, "run.toml: bad"),
        (BrokerError("no broker\n  at h:1"), 1, "no broker at h:1"),
        (BrokerError("it said \x1b[2J"), 1, r"it said \x1b[2J"),
        (ExceptionGroup("tasks", [BrokerError("lost"), ConfigError("x")]), 1, "lost"),
        (OSError(errno.ENOSPC, "No space left on device", "/r/log"), 1, "/r/log: No space left"),
        (OSError(errno.EACCES, "Permission denied", "/r/log"), 1, "/r/log: Permission denied"),
    ],
)
def test_an_expected_error_is_one_line_and_its_exit_code(monkeypatch, capsys, error, code, line):
    a_command(monkeypatch, raising(error))
    assert main(["probe"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith(f"headrace: error: {line}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "error", [ValueError("bug"), ExceptionGroup("tasks", [ValueError("bug"), BrokerError("lost")])]
)
def test_an_unexpected_error_keeps_its_traceback(monkeypatch, error):
    a_command(monkeypatch, raising(error))
    with pytest.raises(type(error)):
        main(["probe"])


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), BaseExceptionGroup("tasks", [KeyboardInterrupt()])]
)
def test_an_interrupt_is_silent_and_exits_130(monkeypatch, capsys, error):
    a_command(monkeypatch, raising(error))
    assert main(["probe"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_not_an_error():
    done = subprocess.run(
        f"set -o pipefail; {' '.join(HEADRACE)} config keys | head -n 1",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("run.dir")


@pytest.mark.parametrize("name", [b"r\xc3\xa9sum\xc3\xa9", b"r\xe9sum\xe9"])
def test_a_name_that_the_terminal_cannot_show_is_written_out(tmp_path, name):
    done = subprocess.run(
        [*HEADRACE, "domain", "new", "rhymes", "--folder", name],
        capture_output=True, text=True, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wrote r\\" in done.stdout


def test_every_key_and_the_resolved_configuration_are_shown(capsys):
    assert main(["config", "keys", "learner.steps"]) == 0
    assert "learner.steps: int = 10\n    Optimizer steps of the run." in capsys.readouterr().out
    assert main(["config", "keys", "learner.stpes"]) == 2
    assert "no key starts with 'learner.stpes'" in capsys.readouterr().err
    assert main(["config", "show", "learner.steps=77"]) == 0
    assert '"steps": 77' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["config"], "the following arguments are required: ACTION"),
        (["config", "key"], "invalid choice: 'key'"),
        (["config", "keys", "learner", "actors"], "unrecognized arguments: actors"),
    ],
)
def test_a_call_that_asks_for_no_keys_is_refused(capsys, arguments, said):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_the_keys_are_a_page_of_tables_that_is_whole_or_refused(capsys):
    assert main(["config", "keys", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# Every configuration key\n")
    assert "| `learner.steps` | int | `10` | Optimizer steps of the run. |\n" in page
    assert main(["config", "keys", "learner", "--markdown"]) == 2
    assert "leave the prefix away" in capsys.readouterr().err


def test_an_unknown_benchmark_is_refused_with_those_that_exist(capsys):
    assert main(["bench", "nonesuch"]) == 2
    assert "no benchmark 'nonesuch'; there are: " in capsys.readouterr().err
