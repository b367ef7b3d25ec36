"""A persistent shell: state stays, one result per command, no survivor."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from headrace.errors import SandboxError
from headrace.sandbox.admission import Admission
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, SandboxSpec

pytestmark = [pytest.mark.jail, pytest.mark.usefixtures("nothing_left")]

BASH = SandboxSpec(toolchain="bash")


async def test_variables_folders_and_functions_stay():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        await shell.run("x=5; mkdir d; cd d; f() { echo f$1; }")
        result = await shell.run("pwd; echo $x; f 1; echo e >&2")
    assert (result.status, result.exit_code) == ("ok", 0)
    assert (result.stdout, result.stderr) == (b"/box/d\n5\nf1\n", b"e\n")


async def test_each_command_has_its_own_result():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        results = [
            await shell.run(text) for text in ("echo a", "false", "(exit 7)", "echo b", "nope")
        ]
    assert [result.exit_code for result in results] == [0, 1, 7, 0, 127]
    assert [result.stdout for result in results] == [b"a\n", b"", b"", b"b\n", b""]


async def test_a_command_with_a_syntax_error_leaves_the_shell_alive():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        assert (await shell.run("if then 'x")).status == "nonzero_exit"
        assert (await shell.run("echo on")).stdout == b"on\n"


async def test_files_of_the_shell_are_those_of_the_session():
    async with Sandbox(BASH) as box:
        await box.write("in", b"from outside")
        shell = await box.shell()
        assert (await shell.run("cat in")).stdout == b"from outside"
        await shell.run("echo back > out")
        assert await box.read("out") == b"back\n"


async def test_a_command_past_its_time_ends_the_shell():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        await shell.run(":")  # the time of a command passes while the shell still starts, too
        result = await shell.run("echo begun; sleep 600", wall_s=4)
        assert (result.status, result.stdout) == ("timeout", b"begun\n")
        with pytest.raises(SandboxError, match="the shell has ended"):
            await shell.run("echo x")


async def test_exit_ends_the_shell_with_its_code():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        assert (await shell.run("exit 3")).exit_code == 3
        with pytest.raises(SandboxError, match="the shell has ended"):
            await shell.run("echo x")


async def test_a_command_cannot_speak_for_the_next_one():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        result = await shell.run("echo 'exit 0' >&4; echo 'exit 0' >&5; false")
        assert (result.status, result.exit_code) == ("nonzero_exit", 1)
        assert (await shell.run("echo next")).stdout == b"next\n"


async def test_a_report_that_a_command_overwrote_is_its_own_doing():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        spoil = "for fd in $(seq 3 30); do echo garbage >&$fd; done 2>/dev/null"
        result = await shell.run(f"{spoil}; while :; do :; done")  # never says its own
        assert (result.status, result.exit_code) == ("nonzero_exit", 255)
        assert shell.running


async def test_a_shell_that_ended_is_known_at_once():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        await shell.run("exit")
        assert not shell.running


async def test_the_output_of_a_flood_is_bounded():
    async with Sandbox(BASH) as box:
        shell = await box.shell(limits=Limits(output=1000))
        result = await shell.run("yes")
    assert (result.status, len(result.stdout), result.stdout_truncated) == (
        "output_limit",
        1000,
        True,
    )


async def test_a_scorer_starts_only_after_the_shell_is_dead():
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        await shell.run("while :; do echo more >> log; done &")
        scored = await box.spawn_scorer(
            [
                "bash",
                "-c",
                "a=$(wc -c < /candidate/log); sleep 0.2; b=$(wc -c < /candidate/log); "
                "[ $a = $b ] && echo still >&3",
            ]
        )
        assert not shell.running
    assert scored.verdict == b"still\n"


@pytest.mark.parametrize("command", ["a\0b", "x" * 300_000])
async def test_a_bad_command_is_refused(command):
    async with Sandbox(BASH) as box:
        shell = await box.shell()
        with pytest.raises(SandboxError, match="no NUL"):
            await shell.run(command)


async def test_a_toolchain_without_bash_has_no_shell():
    async with Sandbox(SandboxSpec(toolchain="python")) as box:
        with pytest.raises(SandboxError, match="no command 'bash'"):
            await box.shell()


async def test_shells_that_hold_all_memory_go_on_while_another_waits_for_some():
    memory = 64 << 20
    admission = Admission(cpus=1.0, memory=2 * memory, wait_s=20.0)
    spec = SandboxSpec(toolchain="bash", limits=Limits(memory=memory))
    async with AsyncExitStack() as stack:
        boxes = [
            await stack.enter_async_context(Sandbox(spec, admission=admission)) for _ in range(3)
        ]
        shells = [await box.shell() for box in boxes[:2]]
        third = asyncio.create_task(boxes[2].shell())
        await asyncio.sleep(0)
        assert admission.waiting == 1
        assert [(await shell.run("echo on")).stdout for shell in shells] == [b"on\n"] * 2
        assert not third.done()
        await shells[0].close()
        assert (await (await third).run("echo in")).stdout == b"in\n"


async def test_a_shell_whose_start_cannot_be_sent_has_ended_and_holds_no_memory(
    no_memory_file_once,
):
    limits = Limits()
    admission = Admission(cpus=limits.cpus, memory=limits.memory, wait_s=5.0)
    spec = SandboxSpec(toolchain="bash", limits=limits)
    async with Sandbox(spec, admission=admission) as box:
        no_memory_file_once()
        dead = await box.shell()
        assert not dead.running
        shell = await box.shell()
        assert (await shell.run("echo on")).stdout == b"on\n"


async def test_a_command_that_cannot_be_sent_gives_back_its_cpu(no_memory_file_once):
    admission = Admission(cpus=Limits().cpus, memory=1 << 30, wait_s=5.0)
    async with Sandbox(BASH, admission=admission) as box:
        shell = await box.shell()
        await shell.run("x=5")
        no_memory_file_once()
        with pytest.raises(SandboxError, match="Too many open files"):
            await shell.run("x=6")
        assert (await shell.run("echo $x")).stdout == b"5\n"
