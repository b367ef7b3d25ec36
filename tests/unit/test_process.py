import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import cast

import pytest

from headrace.broker.connection import Connection
from headrace.broker.leases import Lease
from headrace.broker.subjects import RunNames
from headrace.process import end, leased


@dataclass
class Broker:
    """A connection of which only the release of a lease is asked."""

    released: list[str] = field(default_factory=list)

    @property
    def js(self) -> "Broker":
        return self

    async def purge_stream(self, _: str, *, subject: str) -> None:
        self.released.append(subject)


async def test_an_error_that_ends_the_renewal_of_a_lease_is_logged_when_it_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> Lease:
        raise KeyError("no such counter")

    broker, names = Broker(), RunNames("t")
    with caplog.at_level(logging.ERROR):
        async with leased(cast("Connection", broker), names, "actor", "a1", broken):
            for _ in range(5):  # turns of the loop in which the renewal starts, fails and is logged
                await asyncio.sleep(0)
            assert "renewing the lease of actor a1 ended: KeyError" in caplog.text
    assert broker.released == [names.lease("actor", "a1")]


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(deaf())
    await asyncio.sleep(0)
    await asyncio.wait_for(end(task), 60)
    assert task.cancelled()
