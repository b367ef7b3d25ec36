"""Every domain through the real jail: oracles, no-ops, and answers that try to cheat."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from headrace.broker.records import Verdict
from headrace.environments.answer import AnswerSession
from headrace.environments.check import check_domain
from headrace.environments.domains.arithmetic import Arithmetic
from headrace.environments.domains.python_functions import (
    HIDDEN_TESTS,
    SECOND_ATTEMPT,
    PythonSession,
)
from headrace.environments.domains.waiting import MEDIAN_S, SIGMA, SPEC, WaitingSession
from headrace.environments.jailed import VERDICT_FD, Box
from headrace.environments.protocol import (
    Domain,
    EnvironmentFailure,
    Session,
    Task,
    check_verdict,
)
from headrace.environments.registry import get_domain
from headrace.sandbox.spec import SandboxSpec

pytestmark = pytest.mark.jail

PYTHON = get_domain("python_functions")


def task(domain: Domain = PYTHON, index: int = 0, level: int = 0) -> Task:
    """A task; of Python functions the n-th with two parameters, whose answers never repeat."""
    drawn = (domain.task(number, split="train", level=level) for number in itertools.count())
    if domain is PYTHON and level == 0:
        drawn = (
            each
            for each in drawn
            if "f(a, b)" in each.messages[-1].content and len(set(each.data["expected"])) == 7
        )
    return next(itertools.islice(drawn, index, None))


def expression(wanted: Task) -> str:
    """The right answer to a question with two parameters."""
    return PYTHON.oracle(wanted, []).partition(": return ")[2]


async def judge(domain: Domain, wanted: Task, *actions: str) -> tuple[Verdict, list[str], Session]:
    """Play the given turns; returns the verdict, the messages and the closed session."""
    session = await domain.open(wanted, seed=3)
    messages = []
    try:
        for action in actions:
            observation = await session.step(action)
            messages.append(observation.message)
            if observation.done:
                break
        verdict = await session.verdict()
    finally:
        await session.close()
    check_verdict(verdict, turns=len(messages))
    return verdict, messages, session


async def test_right_code_passes_every_hidden_test_and_its_score_comes_from_a_scorer_jail() -> None:
    verdict, _, session = await judge(PYTHON, task(), f"def f(a, b): return {expression(task())}")
    assert (verdict.score, verdict.success, verdict.side) == (1.0, True, "")
    assert len(verdict.checks) == HIDDEN_TESTS
    assert [e.purpose for e in session.executions] == ["tool", "score"]
    assert all(e.exit_code == 0 and "namespaces" in e.isolation for e in session.executions)


@pytest.mark.parametrize("level", range(PYTHON.levels))
async def test_fenced_code_on_several_lines_is_right_too(level: int) -> None:
    wanted = task(level=level)
    signature, _, value = PYTHON.oracle(wanted, []).partition(": return ")
    code = f"```python\n{signature}:\n    c = {value}\n    return c\n```"
    verdict, _, _ = await judge(PYTHON, wanted, code)
    assert verdict.success


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        ("def f(a, b) return a", "compile", "SyntaxError"),
        ("def f(a, b): return c", "runtime", "NameError: name 'c' is not defined"),
        ("def g(a, b): return a", "runtime", "f is not defined"),
        ("def f(a): return a", "runtime", "TypeError"),
        ("def f(a, b): return 'x'", "assertion", "returned 'x', not "),
        ("", "runtime", "f is not defined"),
        ("import sys; sys.exit(0)", "runtime", "SystemExit"),
        ("import os; os._exit(0)", "exit", "ended the program"),
        ("def f(a, b):\n    import os\n    os.kill(os.getpid(), 9)", "exit", "ended the program"),
        ("def f(a, b): return 'x' * 10**10", "memory", "hit a limit: memory"),
    ],
)
async def test_a_failed_attempt_is_told_what_went_wrong(code: str, kind: str, told: str) -> None:
    verdict, messages, _ = await judge(PYTHON, task(), code, code)
    assert told in messages[0]
    assert (verdict.score, verdict.success) == (0.0, False)
    assert (verdict.side, verdict.kind) == ("model", kind)
    assert verdict.evidence


async def test_a_second_attempt_counts_less_than_a_first() -> None:
    right = f"def f(a, b): return {expression(task())}"
    verdict, _, _ = await judge(PYTHON, task(), "def f(a, b): return c", right)
    assert verdict.success
    assert verdict.score == SECOND_ATTEMPT
    assert verdict.step_scores == [0.0, SECOND_ATTEMPT]


async def test_the_jailed_time_budget_is_the_models() -> None:
    verdict, messages, _ = await judge(PYTHON, task(), "while True: pass")
    assert "hit a limit: timeout" in messages[0]
    assert (verdict.side, verdict.kind) == ("model", "timeout")


async def test_waiting_costs_a_candidate_nothing() -> None:
    idle = f"import time; time.sleep(1.5)\ndef f(a, b): return {expression(task())}"
    verdict, _, _ = await judge(PYTHON, task(), idle)
    assert verdict.success


async def test_some_right_answers_give_a_part_of_the_score_and_no_success() -> None:
    wanted = task()
    inputs, expected = wanted.data["inputs"], wanted.data["expected"]
    known = {tuple(pair): int(value) for pair, value in zip(inputs[:4], expected[:4], strict=True)}
    code = f"def f(a, b): return {known}.get((a, b))"
    verdict, _, _ = await judge(PYTHON, wanted, code, code)
    assert not verdict.success
    assert 0 < verdict.score < 0.5
    assert [check.passed for check in verdict.checks] == [True] * 3 + [False] * 3


CHEATS = {
    "equal_to_everything": (
        "class A(int):\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 0\n"
        "def f(a, b): return A(0)"
    ),
    "bool_for_int": "def f(a, b): return True",
    "float_for_int": "def f(a, b): return float({right})",
    "string_for_int": "def f(a, b): return str({right})",
    "int_subclass": "class I(int): pass\ndef f(a, b): return I({right})",
    "forged_success": (
        "print('1' * 6)\nprint('value 1\\n' * 7)\nprint('PASSED')\ndef f(a, b): return 0"
    ),
    "forged_on_every_descriptor": (
        "import os\n"
        "for fd in range(1, 64):\n"
        "    try: os.write(fd, b'111111')\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "exit_after_forging": "import os\nos.write(1, b'111111')\nos._exit(0)",
    "own_success_exit": "raise SystemExit(0)",
    "exit_in_call": "def f(a, b): raise SystemExit(0)",
    "edited_inputs": (
        "import sys\nsys._getframe(2).f_globals['inputs'].clear()\ndef f(a, b): return 0"
    ),
    "replaced_serialiser": (
        "import sys\n"
        "g = sys._getframe(2).f_globals\n"
        "g['show'] = lambda value: '0'\n"
        "g['line'] = lambda word, text: 'value 0'\n"
        "def f(a, b): return 0"
    ),
    "replaced_builtins": (
        "import builtins\nbuiltins.repr = lambda value: '1'\ndef f(a, b): return 0"
    ),
    "written_verdict_files": (
        "for name in ('verdict', 'score.txt', 'reward.json', '/candidate/x', '/tmp/verdict'):\n"
        "    try: open(name, 'w').write('111111')\n"
        "    except OSError: pass\n"
        "def f(a, b): return 0"
    ),
    "survivor": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True:\n"
        "        for fd in range(1, 16):\n"
        "            try: os.write(fd, b'111111')\n"
        "            except OSError: pass\n"
        "        time.sleep(0.01)\n"
        "def f(a, b): return 0"
    ),
    "marks_as_values": "def f(a, b): return '111111'",
    "newlines_in_values": "def f(a, b): return '\\n'.join(['0'] * 40)",
    "surrogates": "def f(a, b): return '\\ud800'",
    "huge_int": "def f(a, b): return 10 ** 5000",
    "endless_list": "def f(a, b):\n    x = []\n    x.append(x)\n    return x",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_cheating_scores_nothing(name: str) -> None:
    code = CHEATS[name].replace("{right}", expression(task()))
    verdict, _, _ = await judge(PYTHON, task(), code, code)
    assert (verdict.score, verdict.success, verdict.side) == (0.0, False, "model")


async def test_the_candidates_jail_holds_no_expected_value() -> None:
    wanted = next(
        each
        for each in (task(index=index) for index in range(99))
        if all(len(value) > 3 for value in each.data["expected"])
    )
    # disguised, so that the candidate's own source is no place where the values are found
    disguised = [int(value) ^ 5 for value in wanted.data["expected"]]
    spill = (
        "import gc, os, re, sys\n"
        "def f(a, b):\n"
        "    texts = repr((sys.argv, dict(os.environ), sys.stdin.buffer.read()))\n"
        "    seen = set(map(int, re.findall('-?[0-9]+', texts)))\n"
        "    boxes = [x for x in gc.get_objects() if type(x) in (list, tuple, dict)]\n"
        "    for x in [y for box in boxes for y in (box.values() if type(box) is dict else box)]:\n"
        "        if type(x) is int: seen.add(x)\n"
        "        if type(x) is str and re.fullmatch('-?[0-9]+', x): seen.add(int(x))\n"
        f"    return [word for word in {disguised} if word ^ 5 in seen], a in seen"
    )
    _, messages, _ = await judge(PYTHON, wanted, spill, spill)
    assert "returned ([], True), not" in messages[0]  # the inputs are there to be found


async def test_the_same_seed_gives_the_same_answers_from_hashed_order() -> None:
    code = "def f(a, b): return list({'apple', 'pear', 'plum', 'fig', 'date', 'lime'})"
    runs = [await judge(PYTHON, task(), code, code) for _ in range(2)]
    assert "returned [" in runs[0][1][0]
    assert runs[0][1] == runs[1][1]


async def test_files_of_a_first_attempt_do_not_become_modules_of_the_second() -> None:
    plant = "open('operator.py', 'w').write('raise SystemExit(0)')"
    right = f"import operator\ndef f(a, b): return {expression(task())}"
    verdict, _, _ = await judge(PYTHON, task(), plant, right)
    assert verdict.success


@pytest.mark.parametrize(
    ("domain", "right", "wrong"),
    [
        ("arithmetic", lambda t: str(answer(t)), lambda t: str(answer(t) + 1)),
        ("parity", lambda t: "ba"[t.data["parity"]], lambda t: "ab"[t.data["parity"]]),
    ],
)
@pytest.mark.parametrize("index", range(3))
async def test_answers_are_scored_in_the_jail(
    domain: str, right: Callable[[Task], str], wrong: Callable[[Task], str], index: int
) -> None:
    found = get_domain(domain)
    wanted = task(found, index)
    good, _, session = await judge(found, wanted, right(wanted))
    bad, _, _ = await judge(found, wanted, wrong(wanted))
    assert (good.score, good.success, good.side) == (1.0, True, "")
    assert (bad.score, bad.success, bad.side, bad.kind) == (0.0, False, "model", "wrong_answer")
    assert [e.purpose for e in session.executions] == ["score"]


def answer(wanted: Task) -> int:
    numbers = wanted.data["numbers"]
    return sum(numbers) if wanted.data["operation"] == "sum" else max(numbers)


@pytest.mark.parametrize(
    "text", ["{}", " {}.\n", "1 + 2 = {}", "It is {}: the answer", "9, so {} -"]
)
async def test_the_last_number_of_an_answer_counts(text: str) -> None:
    found = get_domain("arithmetic")
    wanted = task(found)
    verdict, _, _ = await judge(found, wanted, text.format(answer(wanted)))
    assert verdict.success
    verdict, _, _ = await judge(
        found, wanted, text.format(f"{answer(wanted)} {answer(wanted) + 1}")
    )
    assert not verdict.success


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1e999",
        "nan",
        "__import__('os')._exit(0)",
        "1\n",
        "0",
        "\0",
        "\ud800",
        "9" * 100_000,
        "largest 8 8 8\n8",
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19",
    ],
)
async def test_odd_answers_are_judged_and_wrong(text: str) -> None:
    found = get_domain("arithmetic")
    wanted = next(t for i in range(99) if answer(t := task(found, i)) not in {0, 1, 8})
    verdict, _, _ = await judge(found, wanted, text)
    assert (verdict.score, verdict.kind) == (0.0, "wrong_answer")


async def test_half_of_random_answers_have_the_wanted_parity() -> None:
    found = get_domain("parity")
    texts = ["abc", "xyz", "hello", "q", "3", "zz"]
    verdicts = await asyncio.gather(
        *[judge(found, task(found, index), text) for index in range(4) for text in texts]
    )
    successes = sum(verdict.success for verdict, _, _ in verdicts)
    assert 0.2 < successes / len(verdicts) < 0.8


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("raise ValueError('scorer bug')", "scorer_error"),
        ("pass", "no_verdict"),
        ("import os; os.write(3, b'\\xff')", "no_verdict"),
        ("import os; os.write(3, b'yes')", "bad_verdict"),
        ("import os; os.write(3, b'1'); os._exit(1)", "scorer_error"),
    ],
)
async def test_a_scorer_that_fails_is_the_environments_failure_and_no_reward(
    program: str, kind: str
) -> None:
    session = AnswerSession(
        await Box.open(SandboxSpec()), program=program, question="sum 1 2", hint=""
    )
    await session.step("3")
    with pytest.raises(EnvironmentFailure) as caught:
        await session.verdict()
    await session.close()
    assert caught.value.kind == kind


class Rigged(PythonSession):
    """A session whose scorer finds every answer wrong."""

    scorer = f"import os; os.write({VERDICT_FD}, b'0' * {HIDDEN_TESTS})"


class Broken(PythonSession):
    """A session whose interpreter ends before it reads the candidate's code."""

    runner = "raise SystemExit(1)"


async def test_a_reward_is_what_the_scorers_process_says_and_nothing_else() -> None:
    rigged = Rigged(task(), await Box.open(SandboxSpec()))
    await rigged.step(PYTHON.oracle(task(), []))
    verdict = await rigged.verdict()
    await rigged.close()
    assert (verdict.score, verdict.success) == (0.0, False)


async def test_a_jail_that_ends_before_the_candidate_began_is_the_environments_failure() -> None:
    broken = Broken(task(), await Box.open(SandboxSpec()))
    with pytest.raises(EnvironmentFailure) as caught:
        await broken.step(PYTHON.oracle(task(), []))
    await broken.close()
    assert caught.value.kind == "runner_error"


async def test_without_a_jail_there_is_no_verdict() -> None:
    session = PythonSession(task(), Box(SandboxSpec()))  # never opened
    with pytest.raises(EnvironmentFailure) as caught:
        await session.step(PYTHON.oracle(task(), []))
    assert caught.value.kind == "sandbox_error"


async def test_a_check_finds_nothing_wrong_with_a_domain_that_judges_right() -> None:
    report = await check_domain(get_domain("arithmetic"), level=0, tasks=6)
    assert report.problems == []
    assert report.oracle == 6


class Gullible(Arithmetic):
    """A domain with a hole: every answer is right."""

    async def open(self, task: Task, *, seed: int) -> AnswerSession:
        program = f"import os; os.write({VERDICT_FD}, b'1')"
        return AnswerSession(await Box.open(SandboxSpec()), program=program, question="", hint="")


class Blind(Arithmetic):
    """A domain whose oracle is wrong."""

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        return "-1"


async def test_a_check_finds_a_hole_and_a_wrong_oracle() -> None:
    gullible = await check_domain(Gullible(), level=0, tasks=2)
    assert "the answer 'exit at once' succeeds on every task" in gullible.problems
    blind = await check_domain(Blind(), level=0, tasks=6)
    assert blind.oracle == 0
    assert all("the oracle fails" in problem for problem in blind.problems)


async def test_a_waiting_episode_holds_a_jailed_process_for_as_long_as_its_seed_says() -> None:
    domain = get_domain("waiting")
    task = domain.task(0, split="train", level=0)
    seed = 18
    drawn = MEDIAN_S * random.Random(seed).lognormvariate(0.0, SIGMA)
    assert 0.3 < drawn < 0.5
    session = await domain.open(task, seed=seed)
    assert isinstance(session, WaitingSession)
    try:
        await session.step(domain.oracle(task, []))
        verdict = await session.verdict()
    finally:
        await session.close()
    assert verdict.success
    tool, _ = session.executions
    assert session._wait_s == drawn
    assert drawn <= tool.wall_s
    assert tool.cpu_s < drawn


async def test_a_wait_that_does_not_end_by_itself_is_the_environments_failure() -> None:
    task = get_domain("waiting").task(0, split="train", level=0)
    session = WaitingSession(await Box.open(SPEC), float("nan"), task)
    with pytest.raises(EnvironmentFailure) as caught:
        await session.step("a")
    await session.close()
    assert (caught.value.kind, caught.value.evidence) == (
        "tool_error",
        "the wait ended with nonzero_exit",
    )
