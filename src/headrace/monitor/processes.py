"""Child processes that never outlive the process that started them (Linux).

A child leads its own process group, asks the kernel for SIGTERM when its parent dies, and is ended
as a group. The parent adopts what its dead children leave behind (`adopt_orphans`), so that even a
grandchild in a group of its own is found and ended (`end_orphans`).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import HeadraceError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ERROR_PREFIX = "headrace: error: "

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Place:
    """On which cores a process runs and how many threads its OpenMP pools have."""

    cores: frozenset[int] = frozenset()
    """Empty: all of the parent's."""
    threads: int | None = None
    """None: the library's own choice."""


class Child:
    """One process of a run, its output file, and how it ended."""

    def __init__(
        self, name: str, command: Sequence[str], output: Path, *, place: Place | None = None
    ) -> None:
        """Describe the process; `start` starts it.

        Args:
            name: what it is called in messages, e.g. `actor-0`.
            command: program and arguments.
            output: file to which stdout and stderr are appended.
            place: where it runs; anywhere when not given.
        """
        self.name = name
        self.output = output
        self._command = list(command)
        self._place = place or Place()
        self._process: subprocess.Popen[bytes] | None = None
        self._output_start = 0

    @property
    def pid(self) -> int | None:
        """Process id of a running child."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process, again if it ended."""
        parent, cores = os.getpid(), self._place.cores

        def before_exec() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)
            if cores:
                os.sched_setaffinity(0, cores)

        environment = dict(os.environ)
        if self._place.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._place.threads)
        with self.output.open("ab") as out:
            self._output_start = out.tell()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=before_exec,  # noqa: PLW1509  # the parent has a single thread
            )

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs or before it was started."""
        return self._process.poll() if self._process else None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process itself; it stops its own children."""
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Kill its whole process group and reap it."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_error(self) -> str:
        """The deliberate error that ended its latest start; empty if it printed none."""
        errors = [line for line in self._lines() if line.startswith(_ERROR_PREFIX)]
        return errors[-1].removeprefix(_ERROR_PREFIX) if errors else ""

    def last_line(self) -> str:
        """The last line that its latest start printed."""
        lines = [line for line in self._lines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def _lines(self) -> list[str]:
        with self.output.open("rb") as file:
            file.seek(self._output_start)
            return file.read().decode(errors="replace").splitlines()


def stop_all(children: Sequence[Child], deadline_s: float) -> list[Child]:
    """Ask children to stop, kill the groups of those that have not by the deadline.

    Returns:
        The children that had to be killed.
    """
    for child in children:
        child.ask_to_stop()
    end = time.monotonic() + deadline_s
    while any(child.pid for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    late = [child for child in children if child.pid]
    for child in children:
        child.end()
    return late


def adopt_orphans() -> None:
    """Become the parent of whatever this process's descendants leave behind.

    Raises:
        HeadraceError: the kernel refuses.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise HeadraceError(f"cannot adopt orphaned processes: {reason}; Linux 3.4 is needed")


def end_orphans(keep: Iterable[int | None], deadline_s: float = 5.0) -> int:
    """Kill and reap every child process of this one whose id is not in `keep`.

    Returns:
        How many were ended.
    """
    kept = set(keep)
    ended: set[int] = set()
    end = time.monotonic() + deadline_s
    while orphans := [pid for pid in own_children() if pid not in kept]:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                ended.add(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return len(ended)


def own_children() -> list[int]:
    """Ids of this process's children, dead ones that were not reaped included."""
    parent = os.getpid()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # the name, second field, may hold spaces and brackets; the parent is two fields on
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(folder.name))
    return found
