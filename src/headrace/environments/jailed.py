"""What sessions share that run code in the sandbox: one box, its executions, its scorer."""

from headrace.broker.records import Execution
from headrace.environments.protocol import EnvironmentFailure
from headrace.errors import CollectionError, DeadlineError, SandboxError, ShellEndedError
from headrace.sandbox.box import Sandbox
from headrace.sandbox.shell import Shell
from headrace.sandbox.spec import Limits, Result, SandboxSpec
from headrace.sandbox.tree import Entry, Rules

PYTHON = ["python3", "-P", "-s", "-S", "-B", "-c"]
"""An interpreter without site-packages, and without the workspace on its path. It is not started
with `-I`, which would ignore the hash seed that makes runs repeatable."""
VERDICT_FD = 3
SCORER_LIMITS = Limits(wall_s=20.0, memory=128 << 20, processes=8, output=64 << 10)
"""Far above what a scorer needs: exceeding them is the environment's failure."""
SCORER_SPEC = SandboxSpec(toolchain="python", disk=4 << 20, files=64, limits=SCORER_LIMITS)
_READ = Rules(entries=1024, depth=256)
"""Above what a workspace of few files can hold."""


class Box:
    """The sandbox of one episode, which remembers every process that ran in it."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._sandbox = Sandbox(spec)
        self._shell: Shell | None = None
        self.executions: list[Execution] = []

    @classmethod
    async def open(cls, spec: SandboxSpec) -> "Box":
        """Open the sandbox.

        Raises:
            EnvironmentFailure: it cannot be built.
        """
        box = cls(spec)
        try:
            await box._sandbox.__aenter__()
        except (SandboxError, DeadlineError) as error:
            raise EnvironmentFailure("sandbox_error", str(error)) from error
        return box

    async def close(self) -> None:
        """Kill what is left and drop the workspace."""
        await self._sandbox.__aexit__(None, None, None)

    async def run(self, purpose: str, argv: list[str], *, stdin: bytes, limits: Limits) -> Result:
        """Run a command; how it ends is the candidate's doing.

        Raises:
            EnvironmentFailure: the sandbox itself failed.
        """
        try:
            result = await self._sandbox.run(argv, stdin=stdin, limits=limits)
        except (SandboxError, DeadlineError) as error:
            raise EnvironmentFailure("sandbox_error", str(error)) from error
        self._note(purpose, result)
        if result.status == "sandbox_error":
            raise EnvironmentFailure("sandbox_error", result.detail)
        return result

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the workspace before anything ran in it.

        Raises:
            EnvironmentFailure: it could not be written.
        """
        try:
            await self._sandbox.write(path, data)
        except (SandboxError, CollectionError) as error:
            raise EnvironmentFailure("sandbox_error", str(error)) from error

    async def start_shell(self, first: str, *, limits: Limits) -> None:
        """Start a persistent shell and prove by a first command that it works.

        Raises:
            EnvironmentFailure: it does not.
        """
        try:
            self._shell = await self._sandbox.shell(limits=limits)
            result = await self._shell.run(first)
        except (SandboxError, DeadlineError) as error:
            raise EnvironmentFailure("sandbox_error", str(error)) from error
        if result.status != "ok":
            raise EnvironmentFailure(
                "sandbox_error", f"{first!r} in a fresh shell: {result.status} {result.detail}"
            )

    @property
    def shell_runs(self) -> bool:
        """Whether the shell takes another command."""
        return self._shell is not None and self._shell.running

    async def command(self, text: str) -> Result | None:
        """Run a command in the shell; None when the shell had ended since the last one.

        Raises:
            EnvironmentFailure: the sandbox itself failed.
        """
        if self._shell is None:
            raise EnvironmentFailure("sandbox_error", "no shell was started")
        try:
            result = await self._shell.run(text)
        except ShellEndedError:
            return None
        except (SandboxError, DeadlineError) as error:
            raise EnvironmentFailure("sandbox_error", str(error)) from error
        self._note("tool", result)
        if result.status == "sandbox_error":
            raise EnvironmentFailure("sandbox_error", result.detail)
        return result

    async def look(self, *, file_bytes: int) -> dict[str, str] | None:
        """Read the workspace as it is now, following no link and running nothing.

        Returns:
            State by relative path: `folder`, `file:` with the text as Latin-1 without trailing
            line feeds, or `special` for links, devices and files of more than `file_bytes` bytes.
            None when a process of the episode changed the tree while it was read.

        Raises:
            EnvironmentFailure: the session is closed.
        """
        try:
            return {
                entry.path: await self._state(entry, file_bytes)
                for entry in await self._sandbox.list(_READ)
            }
        except (CollectionError, FileNotFoundError):
            return None
        except SandboxError as error:
            raise EnvironmentFailure("sandbox_error", str(error)) from error

    async def score(self, program: str, *, stdin: bytes, spec: SandboxSpec = SCORER_SPEC) -> str:
        """Run a scorer in a fresh jail, after everything else of the episode is dead.

        Returns:
            What the scorer wrote to its verdict descriptor, ASCII.

        Raises:
            EnvironmentFailure: the sandbox failed, or the scorer ended without a verdict.
        """
        try:
            scored = await self._sandbox.spawn_scorer([*PYTHON, program], stdin=stdin, spec=spec)
        except (SandboxError, DeadlineError) as error:
            raise EnvironmentFailure("sandbox_error", str(error)) from error
        result = scored.result
        self._note("score", result)
        if result.status == "sandbox_error":
            raise EnvironmentFailure("sandbox_error", result.detail)
        if result.status != "ok":
            last = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise EnvironmentFailure(
                "scorer_error", f"the scorer ended with {result.status}: {last}"
            )
        if scored.verdict is None or not scored.verdict.isascii():
            raise EnvironmentFailure("no_verdict", "the scorer wrote no verdict")
        return scored.verdict.decode("ascii")

    async def _state(self, entry: Entry, file_bytes: int) -> str:
        if entry.kind != "file":
            return "folder" if entry.kind == "folder" else "special"
        if entry.size > file_bytes:
            return "special"
        data = await self._sandbox.read(entry.path, limit=file_bytes)
        return "file:" + data.decode("latin-1").rstrip("\n")

    def _note(self, purpose: str, result: Result) -> None:
        self.executions.append(
            Execution(
                purpose=purpose,
                status=result.status,
                exit_code=result.exit_code,
                signal=result.signal,
                wall_s=result.wall_s,
                cpu_s=result.cpu_s,
                isolation=result.isolation,
                output_sha256=result.stdout_sha256,
            )
        )
