"""What a learner asks before it starts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.broker import leases
from headrace.broker.connection import Connection
from headrace.broker.leases import Lease
from headrace.broker.subjects import RunNames
from headrace.learner import start


async def test_leases_that_cannot_be_read_at_once_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    async def alive(*_: Any) -> list[Lease]:
        asked.append(1)
        if len(asked) == 1:
            raise TimeoutError
        return []

    monkeypatch.setattr(leases, "alive", alive)
    connection = SimpleNamespace(patience_s=60.0, url="", nc=SimpleNamespace(is_closed=False))
    await start._alone(cast("Connection", connection), RunNames("t"))
    assert len(asked) == 2
