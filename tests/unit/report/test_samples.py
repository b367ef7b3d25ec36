"""What a run's log says of its samples, as the learner's state machine understands it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.broker.records import encode
from headrace.broker.runlog import Entry
from headrace.config import Config
from headrace.report import samples
from tests.unit.learner.logs import issued, subject, trajectory


def test_the_first_record_of_a_slot_counts_and_one_beyond_the_group_does_not(
    monkeypatch: pytest.MonkeyPatch,
):
    first, second, beyond = trajectory(0, 0, 1.0), trajectory(0, 0, 0.0), trajectory(0, 2, 1.0)
    records = [first, second, beyond, issued(0, size=2), trajectory(0, 0, 0.5)]

    async def history(_config: Config) -> AsyncIterator[Entry]:
        for seq, record in enumerate(records, 1):
            yield Entry(seq, subject(record), encode(record))

    monkeypatch.setattr(samples, "read_history", history)
    rows = asyncio.run(samples.read_run(Config())).rows
    assert [(row.seq, row.name, row.score) for row in rows] == [(1, "0.0", 1.0)]
