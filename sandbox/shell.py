"""A persistent shell in one long-lived jail: state stays between commands."""

import asyncio
import logging
import time

from headrace.errors import DeadlineError, SandboxError, ShellEndedError
from headrace.sandbox.admission import Admission
from headrace.sandbox.client import Keeper
from headrace.sandbox.results import Facts, build
from headrace.sandbox.spec import Limits, Result

_MARGIN_S = 30.0
_CLOSE_S = 15.0
_COMMAND_BYTES = 256 << 10

_log = logging.getLogger(__name__)


class Shell:
    """A bash whose variables, functions, working directory and background jobs persist.

    A command that exceeds a limit ends the shell; `running` tells. Exit codes come from the shell
    itself, which the commands share: they inform an agent and are no evidence for a reward.
    """

    def __init__(self, keeper: Keeper, name: str, limits: Limits, admission: Admission) -> None:
        self._keeper = keeper
        self._name = name
        self._limits = limits
        self._admission = admission
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.running = False

    async def start(self, message: dict[str, object]) -> None:
        """Start the jail; its memory stays promised until the shell ends."""
        await self._admission.take(0.0, self._limits.memory)
        self.running = True
        self._task = asyncio.create_task(self._live(message))
        # One step of the task sends the request, so that no command can overtake it.
        await asyncio.sleep(0)

    async def _live(self, message: dict[str, object]) -> None:
        try:
            await self._keeper.ask(
                "start", content=b"", wait_s=86400.0, kills=self._name, id=self._name, **message
            )
        finally:
            self.running = False
            self._admission.give(0.0, self._limits.memory)

    async def run(self, command: str, *, wall_s: float | None = None) -> Result:
        """Run one command line and return what it wrote and its exit code.

        Args:
            command: text for the shell.
            wall_s: seconds; the shell's limit by default.

        Raises:
            ShellEndedError: the shell has ended.
            SandboxError: the command holds NUL or is too long, or the sandbox failed.
        """
        text = command.encode()
        if b"\0" in text or len(text) > _COMMAND_BYTES:
            raise SandboxError(f"a shell command has no NUL and at most {_COMMAND_BYTES} bytes")
        async with self._lock:
            asked = time.monotonic()
            await self._admission.take(self._limits.cpus, 0)
            queued_s = time.monotonic() - asked
            seconds = wall_s or self._limits.wall_s
            try:
                answer = await self._keeper.ask(
                    "command",
                    content=text,
                    wait_s=seconds + _MARGIN_S,
                    kills=self._name,
                    jail=self._name,
                    wall_s=seconds,
                    output=self._limits.output,
                )
            finally:
                self._admission.give(self._limits.cpus, 0)
        if "ended" in answer[0]:
            self.running = False
            raise ShellEndedError("the shell has ended; start another")
        if answer[0]["exit"] is not None:
            self.running = False
        return build(Facts.of(answer), isolation=self._keeper.isolation, queued_s=queued_s)

    async def close(self) -> None:
        """Kill the shell and everything it started, and wait for its end."""
        if self._task is None:
            return
        self._keeper.tell("kill", jail=self._name)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._task
        except TimeoutError as error:
            raise DeadlineError(f"a shell's jail did not end within {_CLOSE_S} s") from error
        except SandboxError as error:
            _log.warning("a shell's jail ended badly: %s", error)
        self._task = None
