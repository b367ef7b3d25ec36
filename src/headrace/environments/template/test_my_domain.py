"""The domain judges as it should: the oracle wins, silence and hostile answers do not."""

import asyncio

import pytest

from headrace.environments.check import check_domain
from headrace.environments.registry import get_domain

DOMAIN = get_domain("my_domain")


@pytest.mark.parametrize("level", range(DOMAIN.levels))
def test_the_oracle_wins_and_no_trick_does(level: int) -> None:
    """Silence and hostile answers may be right by chance, but not on every task."""
    report = asyncio.run(check_domain(DOMAIN, level=level, tasks=4))
    assert report.problems == []
    assert report.oracle == report.tasks
