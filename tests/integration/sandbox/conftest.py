"""What a test may look at to find what a jail left behind."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.sandbox.client import shared


def marked(marker: str) -> list[int]:
    """Processes whose command line holds a marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def groups(keeper: int) -> list[str]:
    """Control groups of a keeper, apart from its own empty folder."""
    # os.walk: groups of other keepers may vanish meanwhile.
    return [
        f"{folder}/{name}"
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        if os.path.basename(folder).startswith(f"headrace-{keeper}-")
        for name in names
    ]


def folders(keeper: int) -> list[str]:
    """Control-group folders of a keeper, empty or not."""
    return [
        f"{folder}/{name}"
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(f"headrace-{keeper}-")
    ]


def leftovers(keeper: int) -> dict[str, list[str]]:
    """Processes, mounts, control groups and files of jails: all empty when all is well."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[entry.name] = stat[1]
    mounts = Path(f"/proc/{keeper}/mountinfo").read_text().splitlines()
    return {
        "processes": [pid for pid, parent in parents.items() if parent == str(keeper)],
        "mounts": [line for line in mounts if " /run/box/" in line],
        "groups": groups(keeper),
        "files": [str(path) for path in Path("/tmp").glob("nsjail*")],
    }


NOTHING: dict[str, list[str]] = {"processes": [], "mounts": [], "groups": [], "files": []}


@pytest.fixture
def leftovers_of():
    """The functions of this file, for tests that look themselves."""
    return SimpleNamespace(marked=marked, groups=groups, folders=folders)


@pytest.fixture
async def nothing_left():
    """Check, after the test, that no process, mount, control group or file of a jail is left."""
    yield
    await shared().ask("rest")  # what waits for the next jail is none of this one
    assert leftovers(shared().pid) == NOTHING


@pytest.fixture
def no_memory_file_once(monkeypatch):
    """Let the next memory file of this process fail, as where no descriptor is left."""
    make = os.memfd_create

    def fail(*_):
        monkeypatch.setattr(os, "memfd_create", make)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    return lambda: monkeypatch.setattr(os, "memfd_create", fail)
