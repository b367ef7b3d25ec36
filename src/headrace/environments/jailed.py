"""What sessions share that run code in the sandbox: one box, its executions, its scorer."""

from headrace.broker.records import Execution
from headrace.environments.protocol import EnvironmentFailure
from headrace.errors import DeadlineError, SandboxError
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, Result, SandboxSpec

PYTHON = ["python3", "-P", "-s", "-S", "-B", "-c"]
"""An interpreter without site-packages, and without the workspace on its path. It is not started
with `-I`, which would ignore the hash seed that makes runs repeatable."""
VERDICT_FD = 3
SCORER_LIMITS = Limits(wall_s=20.0, memory=128 << 20, processes=8, output=64 << 10)
"""Far above what a scorer needs: exceeding them is the environment's failure."""


class Box:
    """The sandbox of one episode, which remembers every process that ran in it."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._sandbox = Sandbox(spec)
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

    async def score(self, program: str, *, stdin: bytes) -> str:
        """Run a scorer in a fresh jail, after everything else of the episode is dead.

        Returns:
            What the scorer wrote to its verdict descriptor, ASCII.

        Raises:
            EnvironmentFailure: the sandbox failed, or the scorer ended without a verdict.
        """
        try:
            scored = await self._sandbox.spawn_scorer(
                [*PYTHON, program], stdin=stdin, limits=SCORER_LIMITS
            )
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
