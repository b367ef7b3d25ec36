"""Proof that a domain is sound: tasks repeat, splits are apart, the oracle wins, tricks do not.

A trick that happens to be right on some task is chance; one that is right on every task is a hole.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.broker.records import Verdict
from headrace.environments.generate import SPLITS
from headrace.environments.protocol import Domain, EnvironmentFailure, Task, check_verdict

HOSTILE: dict[str, str] = {
    "exit with success": "import sys; sys.exit(0)",
    "exit at once": "import os; os._exit(0)",
    "raise SystemExit": "raise SystemExit(0)",
    "kill itself": "import os; os.kill(os.getpid(), 9)",
    "equal to everything": (
        "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 0\n"
        "def f(*a): return A()"
    ),
    "forged words": "print('PASSED'); print('1'); print('success'); print('score: 1.0')",
    "forged on every descriptor": (
        "import os\nfor fd in range(1, 64):\n"
        "    try: os.write(fd, b'1')\n    except OSError: pass\nos._exit(0)"
    ),
    "forged files": (
        "for p in ('verdict', 'reward.json', 'score'):\n    open(p, 'w').write('{\"reward\": 1}')"
    ),
    "exit of a shell": "exit 0",
    "not a number": "nan",
    "infinity": "1e999",
    "huge number": "9" * 5000,
    "evaluated": "__import__('os')._exit(0)",
    "NUL": "\0",
    "surrogate": "\ud800",
    "line feeds": "\n" * 3000,
    "long": "a b " * 20_000,
}
LIMITS_HIT: dict[str, str] = {
    "endless loop": "while True: pass",
    "endless memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "fork bomb": "import os\nwhile True: os.fork()",
    "endless loop of a shell": "while :; do :; done",
    "fork bomb of a shell": ":(){ :|:& };:",
}
"""Slow ones: they are tried on one task."""
_MADE = 40
"""Tasks that are made of each split."""
_SHOWN = 3
"""Problems of one kind that are named."""
_EPISODE_S = 600.0
"""Wall-clock limit of one episode: twice that of a run, since many are played at once."""
_CLOSE_S = 20.0


@dataclass
class Report:
    """What a check of one level found."""

    tasks: int
    oracle: int = 0
    """Tasks on which the oracle succeeded."""
    hostile: int = 0
    """Hostile answers that were tried."""
    problems: list[str] = field(default_factory=list)
    """What is wrong; empty when nothing is."""
    wall_s: float = 0.0


async def check_domain(domain: Domain, *, level: int, tasks: int) -> Report:
    """Make tasks, and judge the oracle, silence and hostile answers on the first of both splits.

    Raises:
        ConfigError: the level does not exist.
    """
    begun = time.monotonic()
    report = Report(tasks=tasks, problems=check_generation(domain, level))
    drawn = [
        domain.task(index // 2, split=("train", "heldout")[index % 2], level=level)
        for index in range(tasks)
    ]
    for task in drawn:
        verdict = await _judge(domain, task, domain.oracle, "the oracle", report)
        if verdict is not None and verdict.success and verdict.score == 1.0:
            report.oracle += 1
        elif verdict is not None:
            report.problems.append(
                f"the oracle fails task {_name(task)}: {verdict.kind} {verdict.evidence}"
            )
    await _try(domain, drawn, "an empty answer", "", report)
    for name, answer in HOSTILE.items():
        await _try(domain, drawn, name, answer, report)
    for name, answer in LIMITS_HIT.items():
        await _try(domain, drawn[:1], name, answer, report)
    report.wall_s = time.monotonic() - begun
    return report


def check_generation(domain: Domain, level: int) -> list[str]:
    """What is wrong with the first tasks of both splits, before anything is judged.

    Raises:
        ConfigError: the level does not exist.
    """
    problems: list[str] = []
    made: dict[str, list[Task]] = {
        split: [domain.task(index, split=split, level=level) for index in range(_MADE)]
        for split in SPLITS
    }
    for split, tasks in made.items():
        for index, task in enumerate(tasks):
            if task.ref != domain.task(index, split=split, level=level).ref:
                problems.append(
                    f"task {_name(task)} differs when it is made again; draw everything from the "
                    "generator that `draw` hands out"
                )
            if (task.domain, task.level, task.split, task.index) != (
                domain.id,
                level,
                split,
                index,
            ):
                problems.append(
                    f"task {domain.id}/{level}/{split}/{index} calls itself {_name(task)}"
                )
    train, heldout = ({repr(task.messages) for task in made[split]} for split in SPLITS)
    if common := sorted(train & heldout):
        problems.append(f"train and held-out share tasks, such as {common[0]}; use `draw`")
    return problems[:_SHOWN]


async def _try(domain: Domain, tasks: list[Task], name: str, answer: str, report: Report) -> None:
    report.hostile += 1
    what = f"the answer {name!r}"
    verdicts = await asyncio.gather(
        *[_judge(domain, task, lambda _task, _heard: answer, what, report) for task in tasks]
    )
    won = [verdict is not None and verdict.success for verdict in verdicts]
    if len(won) > 1 and all(won):
        report.problems.append(f"{what} succeeds on every task")


async def _judge(
    domain: Domain,
    task: Task,
    answer: Callable[[Task, Sequence[str]], str],
    what: str,
    report: Report,
) -> Verdict | None:
    """Judge one answer of a function; None when the environment failed."""
    deadline = asyncio.timeout(_EPISODE_S)
    try:
        async with deadline:
            return await _play(domain, task, answer)
    except EnvironmentFailure as failure:
        report.problems.append(f"{what} breaks the environment on task {_name(task)}: {failure}")
    except Exception as error:
        if not deadline.expired():
            # a mistake in the domain's code, whose author needs the traceback and what led to it
            error.add_note(f"raised for {what} on task {_name(task)}")
            raise
        report.problems.append(
            f"{what} has no verdict within {_EPISODE_S:g} s on task {_name(task)}: give every wait "
            "of the session a deadline"
        )
    return None


async def _play(
    domain: Domain, task: Task, answer: Callable[[Task, Sequence[str]], str]
) -> Verdict:
    """One episode.

    Raises:
        EnvironmentFailure: there is no verdict, or none that may be used.
    """
    session = await domain.open(task, seed=0)
    try:
        heard: list[str] = []
        turns = 1
        seen = await session.step(answer(task, heard))
        while not seen.done and turns < task.max_turns:
            heard.append(seen.message)
            turns += 1
            seen = await session.step(answer(task, heard))
        verdict = await session.verdict()
    finally:
        # the episode's deadline may have passed already
        try:
            async with asyncio.timeout(_CLOSE_S):
                await session.close()
        except TimeoutError as error:
            raise EnvironmentFailure(
                "close_deadline", f"the session was not closed within {_CLOSE_S:g} s"
            ) from error
    check_verdict(verdict, turns=turns)
    return verdict


def _name(task: Task) -> str:
    return f"{task.domain}/{task.level}/{task.split}/{task.index}"
