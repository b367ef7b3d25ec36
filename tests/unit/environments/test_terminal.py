"""Jobs and arithmetic of the terminal domain, without a jail."""

import random

import pytest

from headrace.environments.domains.terminal import Terminal, extract_command, gains, holding
from headrace.environments.domains.terminal_jobs import LEVELS

TERMINAL = Terminal()


@pytest.mark.parametrize("level", range(TERMINAL.levels))
def test_no_job_is_done_before_it_begins(level: int) -> None:
    for index in range(300):
        data = TERMINAL.task(index, split="train", level=level).data
        assert not all(holding(data["wanted"], data["start"]))


@pytest.mark.parametrize("level", range(TERMINAL.levels))
def test_a_level_has_thousands_of_jobs(level: int) -> None:
    rng = random.Random(0)
    jobs = [LEVELS[level][0](rng) for _ in range(3000)]
    asked = {" ".join(sorted(sentence for sentence, _ in job.requests)) for job in jobs}
    assert len(asked) > 2000


@pytest.mark.parametrize("level", range(TERMINAL.levels))
def test_a_prompt_is_short_and_its_example_gives_no_answer_away(level: int) -> None:
    for index in range(300):
        task = TERMINAL.task(index, split="train", level=level)
        *shown, asked = task.messages
        assert sum(len(message.content) for message in task.messages) < 300
        assert asked.content not in {message.content for message in shown}
        assert set(task.data["commands"]).isdisjoint(message.content for message in shown)


def test_a_goal_holds_by_its_exact_state_and_foreign_paths_are_seen() -> None:
    wanted = {"a": "folder", "a/b": "file:7", "c": "absent"}
    assert holding(wanted, {"a": "folder", "a/b": "file:7"}) == [True] * 4
    found = {"a": "special", "a/b": "file:77", "c": "folder", "d": "folder"}
    assert holding(wanted, found) == [False] * 4


def test_progress_that_is_lost_and_made_again_is_paid_once() -> None:
    assert gains([0.5, 0.0, 0.5, 1.0]) == [0.5, 0.0, 0.0, 0.5]
    assert gains([0.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("mkdir red", "mkdir red"),
        ("\n\n  mkdir red\nrm x", "mkdir red"),
        ("Now:\n```bash\nmkdir red\ncd red\n```\nrm x", "mkdir red\ncd red"),
        ("```mkdir red```", "mkdir red"),
        ("a\0b\ud800", "ab?"),
        ("", ""),
        ("x" * 5000, "x" * 1024),
    ],
)
def test_a_command_is_the_first_block_or_the_first_line(action: str, command: str) -> None:
    assert extract_command(action) == command
