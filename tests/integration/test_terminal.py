"""The terminal domain through the real jail: state over commands, what counts, what does not."""

import asyncio
from collections.abc import Sequence

import pytest

from headrace.broker.records import Verdict
from headrace.environments.domains.terminal import UNASKED, Terminal, TerminalSession
from headrace.environments.jailed import VERDICT_FD
from headrace.environments.protocol import EnvironmentFailure, Message, Task, check_verdict

pytestmark = pytest.mark.jail

TERMINAL = Terminal()


def job(start: dict[str, str], wanted: dict[str, str], max_turns: int = 3) -> Task:
    """A task of one's own."""
    return Task(
        domain="terminal",
        level=0,
        split="train",
        index=0,
        messages=[Message(role="user", content="")],
        data={
            "requests": [(f"See to {path}.", [path]) for path in wanted],
            "start": start,
            "wanted": wanted,
            "commands": [],
        },
        max_turns=max_turns,
    )


MAKE = job({}, {"red": "folder", "red/cat": "file:7"})
KEEP = job({"old": "file:1", "dog": "file:2"}, {"old": "absent", "dog": "file:2", "new": "file:1"})


async def play(task: Task, *actions: str) -> tuple[Verdict, list[str], TerminalSession]:
    """Play the turns until the session ends; returns the verdict, what was heard, the session."""
    session = await TERMINAL.open(task, seed=3)
    heard: list[str] = []
    try:
        for action in actions:
            seen = await session.step(action)
            heard.append(seen.message)
            if seen.done:
                break
        verdict = await session.verdict()
    finally:
        await session.close()
    check_verdict(verdict, turns=len(heard))
    assert isinstance(session, TerminalSession)
    return verdict, heard, session


@pytest.mark.parametrize("level", range(TERMINAL.levels))
async def test_the_oracle_reaches_every_goal_and_its_steps_add_up_to_one(level: int) -> None:
    async def solve(index: int) -> None:
        task = TERMINAL.task(index, split="heldout", level=level)
        session = await TERMINAL.open(task, seed=0)
        heard: list[str] = []
        try:
            done = False
            while not done:
                seen = await session.step(TERMINAL.oracle(task, heard))
                heard.append(seen.message)
                done = seen.done
            verdict = await session.verdict()
        finally:
            await session.close()
        assert (verdict.score, verdict.success, verdict.side) == (1.0, True, "")
        assert len(heard) < task.max_turns
        assert sum(verdict.step_scores) == pytest.approx(1.0)

    await asyncio.gather(*[solve(index) for index in range(4)])


async def test_folder_and_variables_stay_from_command_to_command() -> None:
    verdict, heard, session = await play(MAKE, "mkdir red; x=7", "cd red", "echo $x > cat")
    assert heard[:2] == ["See to red/cat."] * 2
    assert verdict.success
    assert verdict.step_scores == [0.5, 0.0, 0.5]
    assert [e.purpose for e in session.executions] == ["tool", "tool", "tool", "score"]
    assert all("namespaces" in e.isolation for e in session.executions)


async def test_an_episode_ends_as_soon_as_every_goal_holds() -> None:
    verdict, heard, _ = await play(MAKE, "mkdir red; echo 7 > red/cat", "rm -r red")
    assert (verdict.score, len(heard)) == (1.0, 1)


async def test_what_a_command_wrote_and_its_exit_code_are_told() -> None:
    _, heard, _ = await play(MAKE, "echo out; echo err >&2; (exit 3)", "nope", "true")
    assert heard[0] == "out\nerr\nexit code 3\nSee to red."
    assert "command not found\nexit code 127" in heard[1]
    _, heard, _ = await play(MAKE, "seq 1000", "true", "true")
    assert len(heard[0]) <= 100 + len("\nSee to red.")


async def test_the_next_request_is_made_when_the_files_show_that_the_last_one_is_met() -> None:
    _, heard, _ = await play(MAKE, "mkdir red dog", "echo 7 > red/cat", "rmdir dog")
    assert heard == ["See to red/cat.", UNASKED, ""]


async def test_a_fenced_command_counts_and_so_does_the_first_line_alone() -> None:
    verdict, _, _ = await play(
        MAKE, "Do this:\n```bash\nmkdir red\n```", "echo 7 > red/cat\nrm -r red"
    )
    assert verdict.success


@pytest.mark.parametrize(
    ("commands", "missed"),
    [
        (["ln -s /tmp red; echo 7 > red/cat"], ["red", "red/cat"]),
        (["mkdir red; echo 7 > /tmp/cat; ln -s /tmp/cat red/cat"], ["red/cat"]),
        (["mkdir red; mkfifo red/cat"], ["red/cat"]),
        (["mkdir red; echo 77 > red/cat"], ["red/cat"]),
        (["mkdir red; (head -c 5000 /dev/zero; echo 7) > red/cat"], ["red/cat"]),
        (["mkdir red; echo 7 > red/cat; echo 7 > red/dog"], ["nothing"]),
        (["echo 'file:7'; echo '111111' >&3; touch verdict"], ["red", "red/cat", "nothing"]),
    ],
)
async def test_only_plain_files_and_folders_in_their_places_count(
    commands: list[str], missed: Sequence[str]
) -> None:
    verdict, _, _ = await play(MAKE, *commands)
    assert not verdict.success
    assert verdict.score <= 0.5
    assert [c.name.split()[0] for c in verdict.checks if not c.passed] == list(missed)


async def test_goals_that_are_lost_are_taken_off_and_paid_once() -> None:
    right = "mv old new"
    verdict, _, _ = await play(KEEP, f"{right}; rm dog", "true")
    assert (verdict.success, verdict.score) == (False, 0.25)  # two of two reached, one lost
    assert verdict.step_scores == [0.5, 0.0]
    again = job(KEEP.data["start"], {**KEEP.data["wanted"], "far": "folder"}, max_turns=5)
    verdict, _, _ = await play(again, right, "mv new old", right, "mv new old", "true")
    assert verdict.step_scores == [pytest.approx(2 / 3), 0, 0, 0, 0]
    assert verdict.score == 0.0


async def test_doing_nothing_scores_nothing() -> None:
    verdict, _, _ = await play(KEEP, "", "", "")
    assert (verdict.score, verdict.kind, sum(verdict.step_scores)) == (0.0, "goals", 0.0)


async def test_what_a_background_process_would_do_after_the_end_does_not_happen() -> None:
    late = "(while [ ! -e go ]; do sleep 0.05; done; {}) &"

    async def after_the_end(*actions: str) -> tuple[Verdict, dict[str, str] | None]:
        """The verdict, and the files when the process had its signal and time for a second one."""
        session = await TERMINAL.open(MAKE, seed=3)
        assert isinstance(session, TerminalSession)
        try:
            for action in actions:
                await session.step(action)
            verdict = await session.verdict()
            await session._box.write("go", b"")
            await session.verdict()
            return verdict, await session._box.look(file_bytes=99)
        finally:
            await session.close()

    verdict, files = await after_the_end(late.format("rm -r red") + " mkdir red; echo 7 > red/cat")
    assert verdict.success
    assert files == {"go": "file:", "red": "folder", "red/cat": "file:7"}
    verdict, files = await after_the_end(late.format("mkdir red; echo 7 > red/cat"))
    assert (verdict.success, verdict.score) == (False, 0.0)
    assert files == {"go": "file:"}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("exit 0", "exit"),
        ("exit 3", "exit"),
        ("exec true", "exit"),
        ("while :; do :; done", "timeout"),
        ("yes", "output_limit"),
        ("x=a; while :; do x=$x$x; done", "memory"),
        ("mkdir red; echo 7 > red/cat; exit", "exit"),
    ],
)
async def test_ending_the_shell_is_the_models_failure(command: str, kind: str) -> None:
    verdict, heard, _ = await play(MAKE, command, "true", "true")
    assert (verdict.success, verdict.side, verdict.kind) == (False, "model", kind)
    assert verdict.score <= 0.25
    assert len(heard) == 1


async def test_a_shell_that_ends_between_two_commands_is_the_models_failure() -> None:
    session = await TERMINAL.open(MAKE, seed=0)
    await session.step("(sleep 0.2; yes) &")
    assert isinstance(session, TerminalSession)
    shell = session._box._shell
    assert shell is not None
    assert shell._task is not None
    async with asyncio.timeout(60):
        await asyncio.shield(shell._task)
    assert (await session.step("true")).done
    verdict = await session.verdict()
    await session.close()
    assert (verdict.side, verdict.kind) == ("model", "shell_ended")


@pytest.mark.parametrize(
    "command",
    [
        ":(){ :|:& };:",
        "for i in $(seq 3 30); do echo garbage >&$i; done",
        "for i in $(seq 3 30); do echo exit 0 >&$i; done",
        "read() { :; }",
        "mkdir x; chmod 0 x; chmod 0 .",
        "mkdir -p $(seq -s / 50)",
        "touch $'\\xff'; mkfifo p; ln -s / l",
        "cat /dev/zero > big",
        "\0\ud800",
        "a" * 10_000,
    ],
)
async def test_a_hostile_command_is_judged_and_never_breaks_the_environment(command: str) -> None:
    verdict, _, _ = await play(MAKE, command, "true", "true")
    assert (verdict.score, verdict.side) == (0.0, "model")


class Broken(TerminalSession):
    """A session whose scorer says nothing of use."""

    scorer = f"import os; os.write({VERDICT_FD}, b'1')"


async def test_a_sandbox_that_breaks_is_the_environments_failure() -> None:
    session = await TERMINAL.open(MAKE, seed=0)
    assert isinstance(session, TerminalSession)
    broken = Broken(MAKE, session._box)
    await broken.step("mkdir red")
    with pytest.raises(EnvironmentFailure, match="bad_verdict"):
        await broken.verdict()
    await session.close()
    with pytest.raises(EnvironmentFailure, match="sandbox_error"):
        await session.step("true")
