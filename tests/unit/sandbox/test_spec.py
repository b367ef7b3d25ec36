"""What a spec, limits and a command may be."""

import msgspec
import pytest

from headrace.errors import SandboxError
from headrace.sandbox.spec import Limits, Result, SandboxSpec, check_command


@pytest.mark.parametrize("name", ["wall_s", "memory", "processes", "output", "cpus", "open_files"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_of_zero_or_less_is_refused(name, value):
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({name: value}, Limits)


@pytest.mark.parametrize("name", ["disk", "files"])
def test_a_workspace_without_room_is_refused(name):
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({name: 0}, SandboxSpec)


def test_memory_too_small_for_a_jail_is_refused():
    with pytest.raises(ValueError, match="at least 8 MiB"):
        Limits(memory=1 << 20)


def test_an_unknown_field_is_refused():
    with pytest.raises(msgspec.ValidationError, match="nproc"):
        msgspec.convert({"nproc": 3}, Limits)


def test_the_size_of_a_command_is_counted_in_bytes():
    check_command(["x", "\u20ac" * 30_000], {})
    with pytest.raises(SandboxError, match="at most"):
        check_command(["x", "\u20ac" * 40_000], {})


def test_a_result_is_one_json_object_whatever_bytes_were_written():
    result = Result(
        status="ok",
        exit_code=0,
        signal=None,
        stdout=b"\xff\x00\x1b[0m",
        stderr=b"",
        stdout_truncated=False,
        stderr_truncated=False,
        stdout_sha256="a",
        stderr_sha256="b",
        wall_s=1.0,
        cpu_s=1.0,
        queued_s=0.0,
        peak_memory=1,
        isolation="namespaces",
        limits_hit=("disk",),
    )
    tree = msgspec.json.decode(result.json())
    assert tree["stdout"] == "\ufffd\x00\x1b[0m"
    assert (tree["status"], tree["exit_code"], tree["limits_hit"]) == ("ok", 0, ["disk"])
