import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

SideBySide = Callable[[Callable[[str], Any], str], dict[str, Future[Any]]]


@pytest.fixture(scope="module")
def side_by_side(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    """Start the child process of every selected test of a module, one for each core.

    Args of what it gives: the function that runs a child, and the name of the tests' parameter. The
    result is each child's future by the parameter's value.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def start(run: Callable[[str], Any], parameter: str) -> dict[str, Future[Any]]:
            items = [item for item in request.session.items if item.path == request.path]
            calls = [item.callspec for item in items if hasattr(item, "callspec")]
            values = [call.params[parameter] for call in calls if parameter in call.params]
            return {value: pool.submit(run, value) for value in values}

        yield start
