"""When the learner decides slots itself."""

from typing import Any

import pytest

from headrace.config import load
from headrace.errors import ConfigError
from headrace.learner.issuer import Issuer
from tests.unit.learner.logs import NAMES, Log, issued, run_config, trajectory

DEADLINE_S = 900.0


class TurnedClock:
    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Decisions:
    """Takes what would go into the log; the log itself is in tests/integration/broker."""

    def __init__(self) -> None:
        self.slots: list[tuple[int, int, str]] = []

    async def decide(self, record: Any, *, limit: int, domain: str) -> bool:
        self.slots.append((record.group, record.index, record.kind))
        return True


def issuer(log: Log, decisions: Decisions, clock: TurnedClock, *overrides: str) -> Issuer:
    unused: Any = None
    return Issuer(
        unused, NAMES, decisions, log.machine, unused, load([], list(overrides)),  # type: ignore[arg-type]
        lineage=1, clock=clock,
    )  # fmt: skip


async def test_empty_slots_fail_after_their_deadline_and_decided_ones_stay() -> None:
    log, decisions, clock = Log(run_config()), Decisions(), TurnedClock(0.0)
    keeper = issuer(log, decisions, clock, f"attempts.slot_deadline_s={DEADLINE_S}")
    late = issued(0)
    log.extend([late, trajectory(0, 0, 1.0)])
    clock.now = late.deadline - 1
    await keeper.expire()
    assert decisions.slots == []
    clock.now = late.deadline + 1
    await keeper.expire()
    assert decisions.slots == [(0, 1, "no_actor")]


async def test_what_waited_while_no_learner_ran_has_its_whole_time_again() -> None:
    log, decisions = Log(run_config()), Decisions()
    old = issued(0)
    log.append(old)
    clock = TurnedClock(old.deadline + 5000)  # the learner starts long after the deadline
    keeper = issuer(log, decisions, clock, f"attempts.slot_deadline_s={DEADLINE_S}")
    await keeper.expire()
    assert decisions.slots == []
    clock.now += DEADLINE_S + 1
    await keeper.expire()
    assert [slot[:2] for slot in decisions.slots] == [(0, 0), (0, 1)]


def test_a_log_that_cannot_hold_one_group_is_refused_with_the_least_size() -> None:
    with pytest.raises(ConfigError, match=r"broker\.log_bytes .* cannot hold one group of 500"):
        issuer(
            Log(run_config()),
            Decisions(),
            TurnedClock(0.0),
            "broker.log_bytes=67108864",
            "learner.group_size=500",
        )
