"""Control groups of both versions, on folders that look like the kernel's."""

import errno
import os
from pathlib import Path

import pytest

from headrace.sandbox.cgroups import Counters, Group, _sweep

FILES = {
    1: {
        "memory/memory.limit_in_bytes": "",
        "memory/memory.memsw.limit_in_bytes": "",
        "memory/memory.max_usage_in_bytes": "4096\n",
        "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "pids/pids.max": "",
        "pids/pids.events": "max 3\n",
        "cpu/cpu.cfs_quota_us": "",
        "cpuacct/cpuacct.usage": "1500000000\n",
    },
    2: {
        "one/memory.max": "",
        "one/memory.swap.max": "",
        "one/memory.peak": "4096\n",
        "one/memory.events": "low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\n",
        "one/pids.max": "",
        "one/pids.events": "max 3\n",
        "one/cpu.max": "",
        "one/cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
    },
}
WRITTEN = {
    1: {
        "memory/memory.limit_in_bytes": "1000000",
        "memory/memory.memsw.limit_in_bytes": "1000000",
        "pids/pids.max": "12",
        "cpu/cpu.cfs_quota_us": "150000",
    },
    2: {
        "one/memory.max": "1000000",
        "one/memory.swap.max": "0",
        "one/pids.max": "12",
        "one/cpu.max": "150000 100000",
    },
}


@pytest.fixture(params=[1, 2])
def group(request, tmp_path):
    version = request.param
    for name, text in FILES[version].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    names = ("memory", "pids", "cpu", "cpuacct")
    folders = {name: str(tmp_path / (name if version == 1 else "one")) for name in names}
    return version, tmp_path, Group(folders, version)


def test_limits_are_written_to_the_files_of_the_version(group):
    version, folder, made = group
    made.limit(memory=1_000_000, processes=12, cpus=1.5)
    assert {name: (folder / name).read_text() for name in WRITTEN[version]} == WRITTEN[version]


def test_a_kernel_that_does_not_account_for_swap_gets_no_swap_limit(group):
    _, folder, made = group
    for swap in [*folder.rglob("*memsw*"), *folder.rglob("*swap*")]:
        swap.unlink()
    made.limit(memory=1_000_000, processes=12, cpus=1.0)
    assert [*folder.rglob("*memsw*"), *folder.rglob("*swap*")] == []


def test_counters_mean_the_same_in_both_versions(group):
    _, _, made = group
    assert made.counters() == Counters(
        peak_memory=4096, cpu_s=1.5, memory_kills=2, refused_processes=3
    )


def test_a_group_in_use_is_not_removed_and_an_absent_one_is(tmp_path):
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "task").touch()
    assert not Group({"pids": str(tmp_path / "busy")}, 1).remove()
    os.remove(tmp_path / "busy" / "task")
    made = Group({"pids": str(tmp_path / "busy")}, 1)
    assert made.remove()
    assert made.remove()


@pytest.mark.parametrize("error", [FileNotFoundError(), OSError(errno.ENODEV, "gone")])
def test_groups_of_a_dead_keeper_may_be_swept_by_two_at_once(tmp_path, monkeypatch, error):
    (tmp_path / f"headrace-{2**22 + 1}-1" / "jail").mkdir(parents=True)

    read_text = Path.read_text

    def removed_meanwhile(path):
        if path.name == "cgroup.procs":
            raise error
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", removed_meanwhile)
    _sweep(tmp_path)
