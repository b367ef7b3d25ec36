"""The lookup domain through the real jail: calls, credit, failures, and guesses without tools."""

import re

import pytest

from headrace.broker.records import Verdict
from headrace.environments.check import HOSTILE, check_domain
from headrace.environments.domains.lookup import EXAMPLE, NO_TOOLS, SPEC, Lookup, LookupSession
from headrace.environments.jailed import VERDICT_FD, Box
from headrace.environments.protocol import EnvironmentFailure, Session, Task, check_verdict
from headrace.environments.registry import get_domain

pytestmark = pytest.mark.jail

LOOKUP = Lookup()
TASKS = [LOOKUP.task(0, split="train", level=level) for level in range(LOOKUP.levels)]


def call(item: str) -> str:
    return f'lookup("{item}")'


async def play(
    task: Task, *actions: str, domain: Lookup = LOOKUP, seed: int = 3
) -> tuple[Verdict, list[str], Session]:
    """Play the given turns; returns the verdict, what was heard, and the closed session.

    In an action, `{n}` becomes what turn n heard.
    """
    session = await domain.open(task, seed=seed)
    heard: list[str] = []
    try:
        for action in actions:
            observation = await session.step(action.format(*heard))
            heard.append(observation.message)
            if observation.done:
                break
        verdict = await session.verdict()
    finally:
        await session.close()
    check_verdict(verdict, turns=len(heard))
    return verdict, heard, session


async def price(task: Task, item: str, *, seed: int = 3) -> str:
    _, heard, _ = await play(task, call(item), seed=seed)
    assert re.fullmatch("[1-9][0-9]{2}", heard[0])
    return heard[0]


async def test_each_call_is_a_process_and_the_score_comes_from_a_scorer_jail() -> None:
    verdict, _, session = await play(TASKS[0], call(TASKS[0].data["items"][0]), "It costs {0}.")
    assert (verdict.score, verdict.success, verdict.side) == (1.0, True, "")
    assert [e.purpose for e in session.executions] == ["setup", "tool", "score"]
    assert all(e.exit_code == 0 and "namespaces" in e.isolation for e in session.executions)


async def test_step_scores_credit_first_lookups_of_needed_items_only() -> None:
    first, second, other, _ = TASKS[1].data["items"]
    verdict, _, _ = await play(TASKS[1], call(first), call(other), call(second), "none")
    assert verdict.step_scores == [0.15, 0.0, 0.15, 0.3]
    assert (verdict.score, verdict.success, verdict.kind) == (0.3, False, "wrong_answer")
    verdict, _, _ = await play(TASKS[1], call(first), call(first), call(first), "{0}")
    assert verdict.step_scores == [0.15, 0.0, 0.0, 0.15]
    assert (verdict.score, verdict.success, verdict.kind) == (0.15, False, "not_looked_up")
    verdict, _, _ = await play(TASKS[1], call(second), "nothing", call(first))
    assert verdict.step_scores == [0.15, 0.15]


async def test_the_higher_of_two_prices_is_wanted_in_whatever_order_they_are_looked_up() -> None:
    items = TASKS[1].data["asked"]
    prices = [int(await price(TASKS[1], item)) for item in items]
    for answer, success in ((max(prices), True), (min(prices), False)):
        verdict, _, _ = await play(TASKS[1], call(items[1]), call(items[0]), str(answer))
        assert verdict.success is success
        assert verdict.step_scores[:2] == [0.15, 0.15]


async def test_the_item_that_a_price_names_is_needed_and_its_price_is_wanted() -> None:
    asked, *others = TASKS[2].data["items"]
    _, (said,), _ = await play(TASKS[2], call(asked))
    named = said.removeprefix("same as ")
    assert named in others
    verdict, _, _ = await play(TASKS[2], call(asked), call(named), "The price is {1}.")
    assert (verdict.step_scores, verdict.success) == ([0.15, 0.15, 1.0], True)
    wrong = next(item for item in others if item != named)
    verdict, _, _ = await play(TASKS[2], call(asked), call(wrong), "The price is {1}.")
    assert (verdict.step_scores, verdict.kind) == ([0.15, 0.0, 0.15], "not_looked_up")


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ('lookup("moon")', 'Error: there is no item "moon".'),
        ('lookup("a\tb;\ud800\0")', 'Error: there is no item "a\tb;?\0".'),
        ("lookup(moon)", 'Error: a call is lookup("item") and nothing else.'),
        ('lookup("moon") is 5', 'Error: a call is lookup("item") and nothing else.'),
        ('lookup("m\nn")', 'Error: a call is lookup("item") and nothing else.'),
        (f'lookup("{"x" * 61}")', 'Error: a call is lookup("item") and nothing else.'),
    ],
)
async def test_a_bad_call_is_told_what_is_wrong_and_the_episode_goes_on(
    action: str, told: str
) -> None:
    right = call(TASKS[0].data["asked"][0])
    verdict, heard, _ = await play(TASKS[0], action, f" {right}\n", "{1}")
    assert heard[0] == told
    assert (verdict.step_scores, verdict.success) == ([0.0, 0.3, 1.0], True)


@pytest.mark.parametrize("text", ["{0}", " The price is {0}.\n", "${0}", "It is {0} - yes"])
async def test_the_only_number_of_an_answer_counts(text: str) -> None:
    verdict, _, _ = await play(TASKS[0], call(TASKS[0].data["asked"][0]), text)
    assert verdict.success


@pytest.mark.parametrize(
    "text",
    ["1{0}", "{0}1", "0{0}", "-{0}", "{0}.0", "{0} or 999", "{0} {0}", "{0}\n1", "", "\0", EXAMPLE],
)
async def test_an_answer_with_another_or_a_second_number_is_wrong(text: str) -> None:
    verdict, _, _ = await play(TASKS[0], call(TASKS[0].data["asked"][0]), text)
    assert (verdict.score, verdict.success) == (0.3, False)
    assert (verdict.side, verdict.kind) == ("model", "wrong_answer")
    assert TASKS[0].data["asked"][0] in verdict.evidence


async def test_calls_without_an_answer_are_the_models_failure() -> None:
    verdict, _, _ = await play(TASKS[0], "lookup()", call(TASKS[0].data["asked"][0]))
    assert (verdict.side, verdict.kind) == ("model", "no_answer")
    # or calling for ever would be the easiest way to a reward
    assert (verdict.score, verdict.step_scores) == (0.0, [0.0, 0.0])


async def test_the_right_price_without_its_lookup_is_a_guess_and_scores_nothing() -> None:
    right = await price(TASKS[0], TASKS[0].data["asked"][0])
    verdict, _, _ = await play(TASKS[0], right)
    assert {check.name: check.passed for check in verdict.checks} == {
        "looked_up": False,
        "answer": True,
    }
    assert (verdict.score, verdict.success, verdict.kind) == (0.0, False, "not_looked_up")


async def test_every_episode_has_prices_of_its_own_and_a_seed_repeats_them() -> None:
    item = TASKS[0].data["asked"][0]
    prices = [await price(TASKS[0], item, seed=seed) for seed in (1, 2, 3, 4, 1)]
    assert len(set(prices[:4])) > 1
    assert prices[0] == prices[4]


@pytest.mark.parametrize("level", range(LOOKUP.levels))
async def test_without_tools_nothing_succeeds(level: int) -> None:
    task, domain = TASKS[level], Lookup(tools=False)
    needed = task.data["items"]
    right = [await price(task, item) for item in needed[level == 2 :]]
    for answer in [EXAMPLE, NO_TOOLS, *right, *list(HOSTILE.values())[:4]]:
        first = call(needed[0])
        verdict, heard, session = await play(
            task, first, answer.replace("{", "{{").replace("}", "}}"), domain=domain
        )
        assert heard[0] == NO_TOOLS
        assert (verdict.score, verdict.success, verdict.step_scores) == (0.0, False, [0.0, 0.0])
        assert [e.purpose for e in session.executions] == ["setup", "score"]


async def test_without_tools_the_oracle_is_refused_until_its_turns_are_used() -> None:
    verdict, heard, _ = await play(
        TASKS[1], *[call(item) for item in TASKS[1].data["items"]], domain=Lookup(tools=False)
    )
    assert heard == [NO_TOOLS] * 4
    assert (verdict.score, verdict.success, verdict.kind) == (0.0, False, "no_answer")


async def test_a_check_finds_nothing_wrong() -> None:
    report = await check_domain(get_domain("lookup"), level=0, tasks=2)
    assert report.problems == []
    assert report.oracle == 2


class Unset(LookupSession):
    """A session whose prices are never written."""

    setup = "pass"


class Rigged(LookupSession):
    """A session whose scorer does not speak of every turn."""

    scorer = f"import os; os.write({VERDICT_FD}, b'11 1 1')"


async def test_a_jail_without_prices_is_the_environments_failure() -> None:
    session = Unset(TASKS[0], await Box.open(SPEC), tools=True)
    await session.draw()
    with pytest.raises(EnvironmentFailure) as caught:
        await session.step(call("moon"))
    assert caught.value.kind == "tool_error"
    await session.step("5")
    with pytest.raises(EnvironmentFailure) as caught:
        await session.verdict()
    await session.close()
    assert caught.value.kind == "scorer_error"


async def test_marks_that_do_not_fit_the_turns_are_the_environments_failure() -> None:
    session = Rigged(TASKS[0], await Box.open(SPEC), tools=True)
    with pytest.raises(EnvironmentFailure) as caught:
        await session.verdict()
    assert caught.value.kind == "no_answer"
    await session.step("5")
    with pytest.raises(EnvironmentFailure) as caught:
        await session.verdict()
    await session.close()
    assert caught.value.kind == "bad_verdict"
