"""Nothing of a session survives: not its processes, mounts, control groups or files."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import SandboxError
from headrace.sandbox import client
from headrace.sandbox.admission import Admission
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, Result, SandboxSpec

pytestmark = pytest.mark.jail

WAIT_S = 60
LONG = Limits(wall_s=600)
"""For jails that the test ends itself."""
OWNER = """
import asyncio, sys
from headrace.sandbox.box import Sandbox
from headrace.sandbox.client import shared
from headrace.sandbox.spec import Limits, SandboxSpec

DAEMON = '''
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            pass
while True:
    open("up", "w").close()
    time.sleep(0.01)
'''

async def jail(marker, up):
    async with Sandbox(SandboxSpec(limits=Limits(wall_s=600))) as box:
        task = asyncio.create_task(box.run(["python3", "-S", "-c", DAEMON, marker]))
        while not await box.list():
            await asyncio.sleep(0.01)
        up()
        await task

async def main():
    count = 0
    def up():
        nonlocal count
        count += 1
        if count == 2:
            print(shared().pid, flush=True)
    await asyncio.gather(jail(sys.argv[1], up), jail(sys.argv[1], up))

asyncio.run(main())
"""


def await_end(pid: int, what: str) -> None:
    """Wait until a process is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = poll.poll(WAIT_S * 1000)
    os.close(fd)
    assert ended, f"{what} {pid} is still there after {WAIT_S} s"


async def seen(look: Callable[[], list[int]], run: asyncio.Task[Result]) -> list[int]:
    """What a look finds, as soon as it finds something; nothing when the run ends before."""

    def again() -> list[int]:
        while not (found := look()) and not run.done():
            pass
        return found

    return await asyncio.to_thread(again)


def test_a_killed_owner_leaves_nothing(leftovers_of):
    marker = uuid.uuid4().hex
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", OWNER, marker], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    keeper = int(owner.stdout.readline())
    jailed = leftovers_of.marked(marker)
    assert len(jailed) > 3
    assert len(leftovers_of.groups(keeper)) > 0
    owner.kill()
    owner.wait()
    owner.stdout.close()
    await_end(keeper, "the keeper")
    for pid in jailed:
        await_end(pid, "a jailed process")
    assert leftovers_of.marked(marker) == []
    assert leftovers_of.groups(keeper) == []
    assert leftovers_of.folders(keeper) == []
    assert list(Path("/tmp").glob("nsjail*")) == []


async def test_a_killed_keeper_ends_its_jails_and_another_takes_over(leftovers_of):
    marker = uuid.uuid4().hex
    keeper = client.shared()
    code = "import os, time; os.fork(); time.sleep(600)"

    def forked() -> list[int]:
        found: list[int] = leftovers_of.marked(marker)
        return found if len(found) > 2 else []

    async with Sandbox(SandboxSpec(limits=LONG)) as box, Sandbox(SandboxSpec()):
        task = asyncio.create_task(box.run(["python3", "-S", "-c", code, marker]))
        assert await seen(forked, task)
        started = children(keeper.pid)
        assert len(started) > 1  # nsjail, and a spare
        os.kill(keeper.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="keeper"):
            await task
        await_end(keeper.pid, "the keeper")
    for pid in (*started, *leftovers_of.marked(marker)):
        await_end(pid, "a jailed process")
    async with Sandbox(SandboxSpec()) as box:
        assert (await box.run(["python3", "-S", "-c", "print(1)"])).stdout == b"1\n"
    assert client.shared().pid != keeper.pid
    assert leftovers_of.folders(keeper.pid) == []


def children(parent: int) -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(text.rpartition(")")[2].split()[1]) == parent:
            found.append(int(path.parent.name))
    return found


def first_processes() -> list[int]:
    """The first process of every jail of this process."""
    return [first for nsjail in children(client.shared().pid) for first in children(nsjail)]


async def test_a_killed_jail_leaves_no_zombie_to_the_host():
    async with Sandbox(SandboxSpec()) as box:
        task = asyncio.create_task(
            box.run(["/sbin/init", "-c", "while :; do :; done"], limits=LONG)
        )
        (first,) = await seen(first_processes, task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not Path(f"/proc/{first}").exists()


async def test_sessions_leave_no_descriptor():
    async def session():
        async with Sandbox(SandboxSpec()) as box:
            await box.run(["/sbin/init", "-c", ":"])

    await session()
    before = len(os.listdir("/proc/self/fd"))
    keeper = f"/proc/{client.shared().pid}/fd"
    inside = 0
    # every session leaves one spare more, until there are enough; a leak would never end
    for _ in range(25):
        if len(os.listdir(keeper)) == inside:
            break
        inside = len(os.listdir(keeper))
        await session()
    for _ in range(25):
        await session()
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(os.listdir(keeper)) == inside


async def test_cancelled_runs_leave_no_descriptor():
    async def cancelled(box):
        run = asyncio.create_task(box.run(["/sbin/init", "-c", "while :; do :; done"], limits=LONG))
        await seen(first_processes, run)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    async with Sandbox(SandboxSpec()) as box:
        await cancelled(box)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            await cancelled(box)
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_session_cancelled_while_it_opens_leaves_no_workspace(monkeypatch):
    keeper = client.shared()
    send = keeper._send

    def cancelling(message, *content):
        send(message, *content)
        if message["op"] == "open":
            opening.cancel()

    monkeypatch.setattr(keeper, "_send", cancelling)
    opening = asyncio.create_task(Sandbox(SandboxSpec()).__aenter__())
    with pytest.raises(asyncio.CancelledError):
        await opening
    await keeper.ask("rest")  # answered after all that was sent before
    assert " /run/box/" not in Path(f"/proc/{keeper.pid}/mountinfo").read_text()


async def test_a_shell_cancelled_while_it_starts_ends_with_its_session():
    limits = Limits()
    admission = Admission(cpus=limits.cpus, memory=2 * limits.memory, wait_s=5.0)
    spec = SandboxSpec(toolchain="bash", limits=limits)
    async with Sandbox(spec, admission=admission) as box:
        starting = asyncio.create_task(box.shell())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await box.run(["true"])  # so that the shell, which was asked for before, is up
    await admission.take(limits.cpus, 2 * limits.memory)
    assert first_processes() == []
