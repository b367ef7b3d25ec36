"""From counted facts to a status: what ended a run, and whose fault it was."""

import os

import pytest

from headrace.sandbox.results import Facts, build
from headrace.sandbox.transfer import memory_file

EXITED = b"[I] pid=7 ([STANDALONE MODE]) exited with status: %d, (PIDs left: 0)\n"
SIGNALLED = b"[I] pid=7 ([STANDALONE MODE]) terminated with signal: SIGSEGV (%d), (PIDs left: 0)\n"
NOT_RUN = b"[E] mount failed\n[W] Received error message before it has been executed\n"


def facts(report=b"exit 0\n", log=b"", truncated=(), **answer):
    parts = {"stdout": b"out", "stderr": b"", "log": log, "report": report}
    counted = {
        "reason": "",
        "exit": 0,
        "wall_s": 1.0,
        "cpu_s": 0.5,
        "peak_memory": 7,
        "memory_kills": 0,
        "refused_processes": 0,
        "disk_full": False,
        **answer,
    }
    counted |= {"parts": {name: len(data) for name, data in parts.items()}}
    counted |= {"truncated": list(truncated)}
    return Facts.of((counted, memory_file(b"".join(parts.values()))))


CASES = {
    "success": (facts(), "ok", 0, None, ()),
    "exit code": (facts(b"exit 3\n"), "nonzero_exit", 3, None, ()),
    "code above 128 without a remark": (facts(b"exit 139\n"), "nonzero_exit", 139, None, ()),
    "remark of a signal": (facts(b"Segmentation fault\nexit 139\n"), "signal", None, 11, ()),
    "scorer's exit code": (facts(b"", EXITED % 4), "nonzero_exit", 4, None, ()),
    "scorer's signal": (facts(b"", SIGNALLED % 11), "signal", None, 11, ()),
    "timeout": (facts(b"", reason="timeout"), "timeout", None, 9, ()),
    "output": (facts(b"", reason="output_limit"), "output_limit", None, 9, ()),
    "memory": (facts(b"Killed\nexit 137\n", memory_kills=1), "memory", None, 9, ("memory",)),
    "memory of the init": (facts(b"", memory_kills=2), "memory", None, 9, ("memory",)),
    "processes": (facts(b"exit 1\n", refused_processes=3), "processes", 1, None, ("processes",)),
    "disk": (facts(b"exit 1\n", disk_full=True), "disk", 1, None, ("disk",)),
    "limits of a success": (
        facts(memory_kills=1, disk_full=True),
        "ok",
        0,
        None,
        ("memory", "disk"),
    ),
    "timeout past a limit": (
        facts(b"", reason="timeout", refused_processes=1),
        "timeout",
        None,
        9,
        ("processes",),
    ),
    "jail not built": (facts(b"", NOT_RUN + SIGNALLED % 9), "sandbox_error", None, None, ()),
    "jail not built on a full workspace": (
        facts(b"", NOT_RUN, disk_full=True),
        "sandbox_error",
        None,
        None,
        ("disk",),
    ),
    "no word of the end": (facts(b""), "sandbox_error", None, None, ()),
    "a shell whose report was written to": (facts(b"1", exit=None), "nonzero_exit", 255, None, ()),
    "cancelled": (facts(b"", reason="cancelled"), "sandbox_error", None, None, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_status_of(name):
    counted, *expected = CASES[name]
    result = build(counted, isolation="namespaces", queued_s=0.0)
    ended = [result.status, result.exit_code, result.signal, result.limits_hit]
    assert ended == expected


def test_a_fault_says_what_nsjail_complained_of():
    result = build(facts(b"", NOT_RUN), isolation="", queued_s=0.0)
    assert "mount failed" in result.detail


def test_streams_are_told_apart_and_hashed():
    result = build(facts(truncated=("stdout",)), isolation="", queued_s=0.25)
    assert (result.stdout, result.stdout_truncated, result.stderr_truncated) == (
        b"out",
        True,
        False,
    )
    assert result.stdout_sha256 != result.stderr_sha256
    assert result.queued_s == 0.25


def test_the_memory_file_is_closed():
    before = len(os.listdir("/proc/self/fd"))
    facts()
    assert len(os.listdir("/proc/self/fd")) == before
