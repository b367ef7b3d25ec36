"""Control groups of jails: limits and counters for a whole tree of processes.

Version 1 puts every jail into one group per controller, version 2 into one group. Groups live under
the keeper's own group, so a container's limits keep holding. Standard library only.
"""

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple

_V1_NEEDED = ("memory", "pids", "cpuacct", "cpu")
_V2_NEEDED = ("memory", "pids", "cpu")
_PERIOD_US = 100_000


class Counters(NamedTuple):
    """What the kernel counted for a group. Bytes, seconds, events."""

    peak_memory: int
    cpu_s: float
    memory_kills: int
    refused_processes: int


class Group:
    """The control group of one jail."""

    def __init__(self, directories: dict[str, str], version: int) -> None:
        self._directories = directories
        self._folders = tuple(dict.fromkeys(directories.values()))
        self._version = version

    def limit(self, *, memory: int, processes: int, cpus: float) -> None:
        """Set the limits: bytes, processes, and CPU seconds per second.

        Raises:
            OSError: the kernel refuses a value.
        """
        quota = int(cpus * _PERIOD_US)
        _put(f"{self._directories['pids']}/pids.max", str(processes))
        folder = self._directories["memory"]
        if self._version == 2:
            _put(f"{folder}/memory.max", str(memory))
            swap, most = f"{folder}/memory.swap.max", "0"
            _put(f"{folder}/cpu.max", f"{quota} {_PERIOD_US}")
        else:
            _put(f"{folder}/memory.limit_in_bytes", str(memory))
            swap, most = f"{folder}/memory.memsw.limit_in_bytes", str(memory)
            _put(f"{self._directories['cpu']}/cpu.cfs_quota_us", str(quota))
        if os.path.exists(swap):  # absent where the kernel does not account for swap
            _put(swap, most)

    def enter(self) -> None:
        """Move the calling process into the group.

        Raises:
            OSError: the kernel refuses.
        """
        for folder in self._folders:
            _put(f"{folder}/cgroup.procs", "0")

    def counters(self) -> Counters:
        """Read the counters."""
        memory = self._directories["memory"]
        refused = _field(f"{self._directories['pids']}/pids.events", "max")
        if self._version == 2:
            return Counters(
                peak_memory=int(_get(f"{memory}/memory.peak")),
                cpu_s=_field(f"{memory}/cpu.stat", "usage_usec") / 1e6,
                memory_kills=_field(f"{memory}/memory.events", "oom_kill"),
                refused_processes=refused,
            )
        return Counters(
            peak_memory=int(_get(f"{memory}/memory.max_usage_in_bytes")),
            cpu_s=int(_get(f"{self._directories['cpuacct']}/cpuacct.usage")) / 1e9,
            memory_kills=_field(f"{memory}/memory.oom_control", "oom_kill"),
            refused_processes=refused,
        )

    def kill(self, *, but: int = 0) -> bool:
        """Send SIGKILL to every process in the group but one; whether there was any."""
        found = False
        for pid in map(int, _get(f"{self._directories['pids']}/cgroup.procs").split()):
            if pid != but:
                found = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return found

    def remove(self) -> bool:
        """Remove the group; False while a process is in it."""
        for folder in self._folders:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


class Cgroups:
    """The groups of one keeper, in a folder named after it.

    Attributes:
        version: 1, 2, or 0 where the keeper may not make groups.
        reason: why the version is 0.
    """

    def __init__(self, version: int, folders: dict[str, Path], reason: str = "") -> None:
        self.version = version
        self.reason = reason
        self._folders = folders

    @classmethod
    def detect(cls) -> "Cgroups":
        """Find the usable hierarchies, make the keeper's folder, sweep what dead keepers left."""
        own = f"headrace-{os.getpid()}-{_start_time(os.getpid())}"
        reason = "no memory, pids and cpu controllers are mounted"
        for version, parents in ((2, _v2_parent()), (1, _v1_parents())):
            if not parents:
                continue
            try:
                if version == 2:
                    _delegate(parents["memory"])
                for parent in set(parents.values()):
                    _sweep(parent)
                folders = {name: parent / own for name, parent in parents.items()}
                for folder in set(folders.values()):
                    folder.mkdir(exist_ok=True)
                    if version == 2:
                        _enable(folder)
                # Without this all jails together would weigh as much as one process of the host.
                weight = len(os.sched_getaffinity(0))
                if version == 2:
                    _put(f"{folders['cpu']}/cpu.weight", str(min(10_000, 100 * weight)))
                else:
                    _put(f"{folders['cpu']}/cpu.shares", str(1024 * weight))
            except OSError as error:
                reason = f"cgroup v{version}: {error}"
                continue
            return cls(version, folders)
        return cls(0, {}, reason)

    def create(self, name: str) -> Group | None:
        """Make a group; None where there are no control groups.

        Raises:
            OSError: the kernel refuses.
        """
        if not self.version:
            return None
        directories = {key: f"{folder}/{name}" for key, folder in self._folders.items()}
        for directory in dict.fromkeys(directories.values()):
            os.mkdir(directory)
        return Group(directories, self.version)

    def close(self) -> None:
        """Remove the keeper's folder."""
        for folder in set(self._folders.values()):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


def _v1_parents() -> dict[str, Path]:
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    parents: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, options, *_ = line.split(" ")
        if kind != "cgroup":
            continue
        for name in set(options.split(",")) & set(_V1_NEEDED):
            inside = Path(target + own.get(name, "/"))
            parents[name] = inside if inside.is_dir() else Path(target)
    return parents if len(parents) == len(_V1_NEEDED) else {}


def _v2_parent() -> dict[str, Path]:
    own = "/"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            own = line[3:]
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split(" ")
        if kind != "cgroup2":
            continue
        inside = Path(target + own)
        parent = inside if inside.is_dir() else Path(target)
        if set(_V2_NEEDED) <= set((parent / "cgroup.controllers").read_text().split()):
            return dict.fromkeys(_V2_NEEDED, parent)
    return {}


def _delegate(parent: Path) -> None:
    """Pass the controllers on to children; a v2 group that does so must hold no process itself."""
    try:
        _enable(parent)
    except OSError:
        inner = parent / "headrace-init"
        inner.mkdir(exist_ok=True)
        for pid in (parent / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                _put(f"{inner}/cgroup.procs", pid)
        _enable(parent)


def _enable(folder: Path) -> None:
    wanted = " ".join(f"+{name}" for name in _V2_NEEDED)
    (folder / "cgroup.subtree_control").write_text(wanted)


def _sweep(parent: Path) -> None:
    for folder in parent.glob("headrace-*-*"):
        _, pid, started = folder.name.split("-")
        if not pid.isdigit() or _start_time(int(pid)) == started:
            continue
        groups = [folder]
        # whatever is gone was removed by another keeper that sweeps at the same time
        with contextlib.suppress(OSError):
            groups = [*folder.glob("*/"), folder]
        for group in groups:
            with contextlib.suppress(OSError):
                for process in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                group.rmdir()


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[19]


def _put(path: str, text: str) -> None:
    # Plain system calls: these are made a dozen times for every jail.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _get(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def _field(path: str, name: str) -> int:
    for line in _get(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
