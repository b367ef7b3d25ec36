"""Runs the checks at the same time, each in a process of its own.

consumes   the configuration of a run, if there is one
produces   findings, in the order in which checks end
waits for  the checks' processes, each until its deadline
unblocked  by their ends, or by killing them

A check that hangs, crashes or cannot even be imported costs its own line alone; that is why none of
them runs in this process.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from headrace.config import Config, to_json
from headrace.doctor.findings import Finding, failed


@dataclass(frozen=True)
class Check:
    """One function of the package: `(config or None) -> list of findings`."""

    name: str
    function: str
    """`module:function` below `headrace.doctor`."""
    deadline_s: float = 30.0


CHECKS = (
    Check("vllm", "software:vllm", 120.0),
    Check("torch", "software:torch", 90.0),
    Check("devices", "devices:devices", 90.0),
    Check("sandbox", "jails:limits", 90.0),
    Check("broker", "broker:server"),
    Check("python", "software:python"),
    Check("packages", "software:packages"),
    Check("toolchains", "jails:toolchains"),
    Check("broker.url", "broker:address"),
    Check("run folder", "run:folder"),
    Check("model", "run:model"),
    Check("domains", "run:domains"),
    Check("memory", "resources:memory"),
    Check("disk", "resources:disk"),
    Check("machine", "resources:limits"),
)
"""Every check, the slow ones first. Deadlines are for a busy machine."""

Command = Callable[[Check], Sequence[str]]


def command_of(check: Check) -> Sequence[str]:
    """Command line of a check's process."""
    return [sys.executable, "-P", "-m", "headrace.doctor.one", check.function]


async def run_checks(
    config: Config | None,
    checks: Sequence[Check] = CHECKS,
    command: Command = command_of,
    *,
    at_once: int | None = None,
) -> AsyncIterator[Finding]:
    """Run the checks and yield what they find as it comes.

    Args:
        config: of the run that the machine is to serve, or None.
        checks: which ones.
        command: gives the command line of a check's process.
        at_once: processes at the same time; by default twice the cores, since many only wait.
    """
    gate = asyncio.Semaphore(at_once or 2 * len(os.sched_getaffinity(0)))
    given = b"" if config is None else to_json(config)

    async def one(check: Check) -> list[Finding]:
        async with gate:
            return await _run(check, command(check), given)

    running = [asyncio.ensure_future(one(check)) for check in checks]
    try:
        for finished in asyncio.as_completed(running):
            for finding in await finished:
                yield finding
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run(check: Check, command: Sequence[str], given: bytes) -> list[Finding]:
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # asyncio would end this process alone, and wait for those that it started already
        await _end(await starting)
        raise
    try:
        async with asyncio.timeout(check.deadline_s):
            out, err = await process.communicate(given)
    except TimeoutError:
        return [
            failed(
                check.name,
                f"the check did not end within {check.deadline_s:g} s",
                "look at what the machine is busy with (`top`), and call `headrace doctor` again",
            )
        ]
    finally:
        await _end(process)
    if process.returncode == 0:
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(out.splitlines()[-1], type=list[Finding])
    return [_broken(check, process.returncode, err)]


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process with everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _broken(check: Check, code: int | None, err: bytes) -> Finding:
    last = err.decode("utf-8", "replace").strip().rpartition("\n")[2] or "it said nothing"
    how = f"ended by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return failed(
        check.name,
        f"the check itself broke ({how}): {last}",
        f"`python -P -m headrace.doctor.one {check.function} < /dev/null` shows all that it says",
    )
