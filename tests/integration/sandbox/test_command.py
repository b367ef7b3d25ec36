"""`headrace sandbox` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jail

HEADRACE = str(Path(sys.executable).with_name("headrace"))


def sandbox(*arguments):
    return subprocess.run(
        [HEADRACE, "sandbox", *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_result_is_one_json_object():
    done = sandbox("run", "--", "sh", "-c", "echo out; echo err >&2; exit 5")
    result = json.loads(done.stdout)
    assert done.returncode == 0
    assert (result["status"], result["exit_code"], result["signal"]) == ("nonzero_exit", 5, None)
    assert (result["stdout"], result["stderr"]) == ("out\n", "err\n")


@pytest.mark.parametrize(
    ("options", "command", "status"),
    [
        (["--time", "0.3"], "sleep 9", "timeout"),
        (["--memory", "32"], "python3 -c 'x = bytearray(1 << 28)'", "memory"),
        (
            ["--processes", "3"],
            "(sleep 1 & sleep 1 & sleep 1 & sleep 1 & wait) || exit 1",
            "processes",
        ),
        (["--files", "10"], "for i in $(seq 20); do : > $i || exit 1; done", "disk"),
        (["--disk", "1"], "head -c 2000000 /dev/zero > x", "disk"),
        (["--output", "4"], "yes", "output_limit"),
    ],
)
def test_each_option_is_a_limit(options, command, status):
    assert (
        json.loads(sandbox("run", *options, "--", "sh", "-c", command).stdout)["status"] == status
    )


def test_the_files_of_a_tree_are_copied_without_its_links(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_text("tree")
    (tmp_path / "sub" / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "sub" / "run").chmod(0o755)
    (tmp_path / "out").symlink_to("/etc/passwd")
    text = "cat sub/f; ls; echo x > sub/f; sub/run"
    result = json.loads(sandbox("run", "--tree", str(tmp_path), "--", "sh", "-c", text).stdout)
    assert (result["stdout"], result["stderr"]) == ("treesub\nran\n", "")
    assert (tmp_path / "sub" / "f").read_text() == "tree"


def test_input_is_read_from_a_file(tmp_path):
    (tmp_path / "in").write_bytes(b"\x00abc")
    result = json.loads(sandbox("run", "--input", str(tmp_path / "in"), "--", "wc", "-c").stdout)
    assert result["stdout"] == "4\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run"], 2, "no command"),
        (["run", "--"], 2, "no command"),
        (["run", "--time", "0", "--", "true"], 2, "wall_s must be above 0"),
        (["run", "--processes", "0", "--", "true"], 2, "processes must be above 0"),
        (["run", "--disk", "0", "--", "true"], 2, "disk must be above 0"),
        (["run", "--clock", "-1", "--", "true"], 2, "clock must be Unix seconds"),
        (["run", "--tree", "/no/such", "--", "true"], 2, "no such folder"),
        (["run", "--input", "/no/such", "--", "true"], 2, "no such file"),
        (["run", "--toolchain", "cobol", "--", "true"], 1, "no toolchain 'cobol'"),
        (["run", "--", "no-such-command"], 1, "no command 'no-such-command'"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, code, message):
    done = sandbox(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_limit_is_proven_on_this_host():
    done = sandbox("check", "--again")
    assert done.returncode == 0, done.stdout
    assert "isolation: namespaces+" in done.stdout
    assert "FAILS" not in done.stdout
    assert sandbox("check").stdout == done.stdout
