"""What a caller asks of the sandbox and what it answers."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from headrace.errors import SandboxError

STATUSES = (
    "ok",
    "nonzero_exit",
    "timeout",
    "memory",
    "output_limit",
    "disk",
    "processes",
    "signal",
    "sandbox_error",
)
MAX_REQUEST_BYTES = 96 << 10


def _positive(struct: Struct, *names: str) -> None:
    for name in names:
        if not getattr(struct, name) > 0:
            raise ValueError(f"{name} must be above 0, got {getattr(struct, name)}")


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one run. They hold for the whole tree of processes."""

    wall_s: float = 10.0
    """Seconds from the start of the jail; time spent waiting for admission does not count."""
    memory: int = 256 << 20
    """Bytes of memory, workspace pages included. Without control groups: per process."""
    processes: int = 64
    """Processes and threads at the same time."""
    output: int = 1 << 20
    """Bytes of standard output, and of standard error."""
    cpus: float = 1.0
    """CPU seconds per second."""
    open_files: int = 256
    """Open descriptors of one process."""

    def __post_init__(self) -> None:
        _positive(self, "wall_s", "memory", "processes", "output", "cpus", "open_files")
        if self.memory < 8 << 20:
            raise ValueError(f"memory must be at least 8 MiB to start a jail, got {self.memory}")
        if self.open_files < 16:
            raise ValueError(f"open_files must be at least 16, got {self.open_files}")


class Mount(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder or file of the host that a jail sees read-only."""

    source: str
    """Absolute path on the host."""
    target: str
    """Absolute path in the jail."""


class SandboxSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session: its toolchain, its workspace, its limits."""

    toolchain: str = "python"
    """Name of a toolchain; `headrace.sandbox.toolchains` lists the built-in ones."""
    toolchain_files: tuple[str, ...] = ()
    """TOML files with further toolchains."""
    trees: tuple[Mount, ...] = ()
    """Further read-only trees."""
    env: dict[str, str] = {}
    """Variables added to the fixed environment of every run."""
    disk: int = 64 << 20
    """Bytes of the workspace, `/tmp` and `/dev/shm` together."""
    files: int = 4096
    """Files, folders and links in them."""
    limits: Limits | None = None
    """Limits of a run that brings none of its own; the toolchain's by default."""
    seed: int = 0
    """`PYTHONHASHSEED` and `SEED` in the jail."""
    clock: int | None = None
    """Unix seconds at which the time of day stands, so that equal inputs give equal bytes; None for
    the host's clock. Random bytes from the C library then follow from `seed`. For programs that
    ask the C library, and for repeatability only: a program can ask the kernel itself."""

    def __post_init__(self) -> None:
        _positive(self, "disk", "files")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")
        if self.clock is not None and not 0 <= self.clock < 1 << 33:
            raise ValueError(f"clock must be Unix seconds in [0, 2**33), got {self.clock}")


class Result(Struct, frozen=True, kw_only=True):
    """How one run ended."""

    status: str
    """One of `STATUSES`: what ended the run. `sandbox_error` is never the candidate's doing."""
    exit_code: int | None
    """None when a signal or the sandbox ended it."""
    signal: int | None
    """Signal that ended the command, if one did."""
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    stdout_sha256: str
    """Of the kept bytes."""
    stderr_sha256: str
    wall_s: float
    """From the start of the jail to the death of its last process."""
    cpu_s: float
    """User and system time of all processes."""
    queued_s: float
    """Time spent waiting for admission."""
    peak_memory: int
    """Bytes; without control groups the largest single process."""
    isolation: str
    """What was in force, e.g. `namespaces+cgroup1+seccomp`."""
    limits_hit: tuple[str, ...]
    """Every limit that was touched, also when the run went on: `memory`, `processes`, `disk`."""
    detail: str = ""
    """Cause of a `sandbox_error`, or why the command could not be executed."""

    def json(self) -> bytes:
        """One JSON object; output is decoded as UTF-8 with replacement, hashes are of the bytes."""
        tree: dict[str, Any] = msgspec.structs.asdict(self)
        tree["stdout"] = self.stdout.decode("utf-8", "replace")
        tree["stderr"] = self.stderr.decode("utf-8", "replace")
        return msgspec.json.encode(tree)


class Scored(Struct, frozen=True, kw_only=True):
    """What a scorer's jail returned."""

    result: Result
    verdict: bytes | None
    """Bytes written to the verdict descriptor; None when the scorer did not exit with 0, wrote
    nothing, or wrote more than the limit."""


def lost(detail: str) -> Result:
    """A result without a run: the sandbox's side failed before or after it."""
    return Result(
        status="sandbox_error",
        exit_code=None,
        signal=None,
        stdout=b"",
        stderr=b"",
        stdout_truncated=False,
        stderr_truncated=False,
        stdout_sha256=sha256(b""),
        stderr_sha256=sha256(b""),
        wall_s=0.0,
        cpu_s=0.0,
        queued_s=0.0,
        peak_memory=0,
        isolation="",
        limits_hit=(),
        detail=detail,
    )


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def check_command(argv: Sequence[str], env: dict[str, str]) -> None:
    """Refuse a command that cannot be started, before anything runs.

    Raises:
        SandboxError: no argv, a NUL or undecodable character, a bad variable name, or more bytes
            than a command may have.
    """
    if not argv or not argv[0]:
        raise SandboxError("argv is empty: name the command to run")
    for text in (*argv, *env, *env.values()):
        if "\0" in text:
            raise SandboxError(f"argv and environment cannot hold a NUL character: {text[:40]!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SandboxError(f"argv and environment must be UTF-8: {text[:40]!r}") from error
    for name in env:
        if not name or "=" in name:
            raise SandboxError(f"bad name of an environment variable: {name!r}")
    size = sum(len(text.encode()) + 1 for text in (*argv, *env, *env.values()))
    if size > MAX_REQUEST_BYTES:
        raise SandboxError(
            f"argv and environment have {size} bytes, at most {MAX_REQUEST_BYTES} are allowed; "
            "pass large inputs as files or on standard input"
        )
