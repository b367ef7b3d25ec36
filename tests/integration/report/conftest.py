"""A broker that answers at once and holds none of the runs: their archives alone are read."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from headrace.broker.server import bundled_server


@pytest.fixture(scope="package")
def empty_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("broker")
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        server = runner.run(stack.enter_async_context(bundled_server(store)))
        yield server.url.replace("nats://", "nats://user:secret@")
        runner.run(stack.aclose())
