"""A sandbox session: a workspace, and commands that run on it in jails."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.errors import SandboxError
from headrace.sandbox import jail, toolchains, tree
from headrace.sandbox.admission import Admission
from headrace.sandbox.client import Keeper, shared
from headrace.sandbox.results import Facts, build
from headrace.sandbox.shell import Shell
from headrace.sandbox.snapshots import Snapshots
from headrace.sandbox.spec import Limits, Result, SandboxSpec, Scored, check_command

_MARGIN_S = 30.0
_VERDICT_BYTES = 1 << 20
_CLOCK = Path(__file__).with_name("clock.c")
_COMPILER = SandboxSpec(toolchain="c")
_loaded: dict[tuple[str, ...], dict[str, toolchains.Toolchain]] = {}
_admission: list[Admission] = []


def host_admission() -> Admission:
    """The admission queue that every session of this process shares unless it is given another."""
    if not _admission:
        _admission.append(Admission.of_host())
    return _admission[0]


class Sandbox:
    r"""A session. Nothing of it survives `close`, nor the end of this process.

    Example:
        >>> async with Sandbox(SandboxSpec()) as box:
        ...     await box.write("main.py", b"print(6 * 7)")
        ...     result = await box.run(["python3", "main.py"])
        ...     result.status, result.stdout
        ('ok', b'42\n')
    """

    def __init__(self, spec: SandboxSpec, *, admission: Admission | None = None) -> None:
        """Check a spec against this host.

        Args:
            spec: the session.
            admission: queue for CPU and memory; this process's own by default.

        Raises:
            SandboxError: an unknown toolchain, or a tree that does not exist.
        """
        self.spec = spec
        self._admission = admission or host_admission()
        if spec.toolchain_files not in _loaded:
            _loaded[spec.toolchain_files] = toolchains.load(spec.toolchain_files)
        self._plan = jail.Plan.of(spec, _loaded[spec.toolchain_files])
        self._keeper: Keeper | None = None
        self._trees: dict[str, str] = {}
        self._name = ""
        self._root = -1
        self._lock = asyncio.Lock()
        self._shells: list[Shell] = []
        self._snapshots = Snapshots()

    @property
    def toolchain(self) -> toolchains.Toolchain:
        """The session's toolchain."""
        return self._plan.toolchain

    @property
    def limits(self) -> Limits:
        """Limits of a run that brings none of its own."""
        return self.spec.limits or self._plan.toolchain.limits

    async def __aenter__(self) -> Self:
        """Make the workspace.

        Raises:
            SandboxError: this host cannot run jails, or has no C compiler for a fixed clock.
        """
        keeper = shared()
        self._trees = {source: await keeper.tree(source) for source in self._plan.sources()}
        if self.spec.clock is not None:
            self._trees[jail.CLOCK] = await keeper.file(jail.CLOCK, self._compile_clock)
        self._name = keeper.name("b")
        try:
            _, fd = await keeper.ask(
                "open", box=self._name, disk=self.spec.disk, files=self.spec.files, uid=_uid(keeper)
            )
            if fd is None:
                raise SandboxError("the sandbox keeper sent no workspace")
        except BaseException:
            # Without a session nobody closes what the keeper may have mounted.
            keeper.tell("close", box=self._name)
            raise
        self._root, self._keeper = fd, keeper
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the session."""
        await self.close()

    async def close(self) -> None:
        """Kill what still runs and free the workspace."""
        if self._keeper is None:
            return
        keeper, self._keeper = self._keeper, None
        try:
            for shell in self._shells:
                await shell.close()
        finally:
            os.close(self._root)
            if keeper.alive:
                await keeper.ask("close", box=self._name)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Run a command in a fresh jail on the workspace, and wait until all of it is dead.

        Args:
            argv: the command; a name without a slash is looked up in the toolchain.
            stdin: contents of standard input.
            env: variables added to the session's.
            limits: limits of this run; the session's by default.

        Raises:
            SandboxError: a bad argv or environment, an unknown command, or a closed session.
            SandboxBusyError: no jail was free in time.
        """
        async with self._lock:
            result, _ = await self._execute(
                argv, stdin=stdin, env=env or {}, limits=limits or self.limits, mode="run"
            )
        return result

    async def spawn_scorer(
        self,
        argv: Sequence[str],
        *,
        files: dict[str, bytes] | None = None,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        limits: Limits | None = None,
        spec: SandboxSpec | None = None,
    ) -> Scored:
        """Run a scorer in a jail of its own after every process of this session is dead.

        The scorer has a fresh workspace with `files`, sees this session's workspace read-only at
        `/candidate`, and writes its verdict to descriptor 3. The scorer is its jail's first
        process: what it starts cannot signal it, trace it or read its memory, and does not get
        descriptor 3 unless the scorer passes it on.

        Args:
            argv: the scorer's command.
            files: contents of its workspace.
            stdin: contents of its standard input.
            env: variables of the scorer.
            limits: limits of the scorer; this session's by default.
            spec: toolchain and workspace of the scorer; this session's by default.

        Raises:
            SandboxError: as for `run`.
        """
        for shell in self._shells:
            await shell.close()
        async with self._lock:
            self._open()
            spec = spec or self.spec
            async with Sandbox(spec, admission=self._admission) as scorer:
                for path, data in (files or {}).items():
                    await scorer.write(path, data)
                result, verdict = await scorer._execute(
                    argv,
                    stdin=stdin,
                    env=env or {},
                    limits=limits or scorer.limits,
                    mode="score",
                    candidate=self._name,
                )
        return Scored(result=result, verdict=verdict if result.status == "ok" else None)

    async def shell(self, *, limits: Limits | None = None) -> Shell:
        """Start a persistent shell on the workspace; the toolchain must have `bash`.

        Raises:
            SandboxError: the toolchain has no bash, or the jail did not start.
        """
        keeper = self._open()
        limits = limits or self.limits
        name = keeper.name("s")
        argv = jail.arguments(
            self._plan,
            ["bash"],
            trees=self._trees,
            box=self._name,
            env={},
            limits=limits,
            uid=_uid(keeper),
            cgroups=keeper.cgroups,
            mode="shell",
        )
        shell = Shell(keeper, name, limits, self._admission)
        # Known before it starts: a caller that is cancelled meanwhile leaves it to `close`.
        self._shells.append(shell)
        await shell.start(self._message(argv, limits, interactive=True))
        return shell

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Write a file of the workspace, making folders on the way.

        Raises:
            CollectionError: a link or something else than a file or folder is in the way.
            SandboxError: not a plain relative path, or the workspace is full.
        """
        keeper = self._open()
        uid = None if keeper.nested else jail.JAIL_UID
        mode = 0o755 if executable else 0o644
        tree.write(self._root, path, data, mode=mode, uid=uid)

    async def copy_in(self, folder: Path) -> None:
        """Copy the regular files below a folder of the host into the workspace.

        Raises:
            CollectionError: the folder exceeds the workspace's number of files or bytes.
            SandboxError: there is no such folder.
        """
        if not folder.is_dir():
            raise SandboxError(f"the tree {str(folder)!r} does not exist")
        rules = tree.Rules(entries=self.spec.files, file_bytes=self.spec.disk)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for path, data in tree.collect(fd, rules).items():
                await self.write(path, data, executable=os.access(folder / path, os.X_OK))
        finally:
            os.close(fd)

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """Read a regular file of the workspace, following no link.

        Raises:
            CollectionError: missing, a link, not a regular file, or larger than `limit` bytes.
            SandboxError: not a plain relative path.
        """
        self._open()
        return tree.read(self._root, path, limit=limit)

    async def list(self, rules: tree.Rules | None = None) -> tuple[tree.Entry, ...]:
        """Every entry of the workspace, of every kind.

        Raises:
            CollectionError: more or deeper than the rules allow.
        """
        self._open()
        entries = [entry for entry, _, _ in tree.walk(self._root, rules or tree.Rules())]
        return tuple(sorted(entries, key=lambda entry: os.fsencode(entry.path)))

    async def collect(self, rules: tree.Rules | None = None) -> dict[str, bytes]:
        """Contents of every regular file; links and special files are left out.

        Raises:
            CollectionError: a limit of the rules is exceeded, or a name is not UTF-8.
        """
        self._open()
        return tree.collect(self._root, rules or tree.Rules())

    async def snapshot(self) -> str:
        """Keep the workspace's present contents; the id is the hash of the tree.

        Raises:
            CollectionError: the workspace is nested too deep.
        """
        self._open()
        async with self._lock:
            return self._snapshots.take(self._root, self.spec)

    async def restore(self, snapshot: str) -> None:
        """Make the workspace equal to a snapshot of this session.

        Raises:
            SandboxError: no such snapshot, or a shell is running.
        """
        keeper = self._open()
        if any(shell.running for shell in self._shells):
            raise SandboxError("close the shell before restoring: it works in the old tree")
        async with self._lock:
            uid = None if keeper.nested else jail.JAIL_UID
            self._snapshots.restore(self._root, snapshot, self.spec, uid=uid)

    async def _compile_clock(self) -> bytes:
        need = "a fixed clock needs a C compiler on this host (on Debian: gcc and libc6-dev)"
        try:
            async with Sandbox(_COMPILER, admission=self._admission) as box:
                await box.write("clock.c", _CLOCK.read_bytes())
                result = await box.run(["gcc", "-O1", "-shared", "-fPIC", "-oclock.so", "clock.c"])
                if result.status != "ok":
                    raise SandboxError(f"gcc: {result.status} {result.stderr[:300]!r}")
                return await box.read("clock.so")
        except SandboxError as error:
            raise SandboxError(f"{need}: {error}") from error

    def _open(self) -> Keeper:
        if self._keeper is None:
            raise SandboxError("the session is not open: use `async with Sandbox(spec) as box`")
        return self._keeper

    async def _execute(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes,
        env: dict[str, str],
        limits: Limits,
        mode: str,
        candidate: str = "",
    ) -> tuple[Result, bytes | None]:
        keeper = self._open()
        check_command(argv, {**self._plan.env, **env})
        command = jail.arguments(
            self._plan,
            argv,
            trees=self._trees,
            box=self._name,
            env=env,
            limits=limits,
            uid=_uid(keeper),
            cgroups=keeper.cgroups,
            candidate=candidate,
            mode=mode,
        )
        message = self._message(command, limits, verdict=mode == "score")
        asked = time.monotonic()
        await self._admission.take(limits.cpus, limits.memory)
        queued_s = time.monotonic() - asked
        name = keeper.name("j")
        try:
            answer = await keeper.ask(
                "start",
                content=stdin,
                wait_s=limits.wall_s + _MARGIN_S,
                kills=name,
                id=name,
                **message,
            )
        finally:
            self._admission.give(limits.cpus, limits.memory)
        facts = Facts.of(answer)
        verdict = None if "verdict" in facts.truncated else facts.parts.get("verdict") or None
        return build(facts, isolation=keeper.isolation, queued_s=queued_s), verdict

    def _message(
        self,
        argv: Sequence[str],
        limits: Limits,
        *,
        interactive: bool = False,
        verdict: bool = False,
    ) -> dict[str, object]:
        return {
            "argv": argv,
            "box": self._name,
            "wall_s": limits.wall_s,
            "memory": limits.memory,
            "processes": limits.processes,
            "overhead": jail.OVERHEAD,
            "cpus": limits.cpus,
            "output": limits.output,
            "verdict": _VERDICT_BYTES if verdict else 0,
            "interactive": interactive,
        }


def _uid(keeper: Keeper) -> int:
    return 0 if keeper.nested else jail.JAIL_UID
