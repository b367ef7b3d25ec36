"""Run state that only the learner writes: lineage, current version, phase; and the model's files.

The lineage rises by one at every start of a learner, by compare-and-set; a learner whose lineage is
no longer the highest must stop before any further effect.
"""

import asyncio
from pathlib import Path

import msgspec
import nats.js.errors
from nats.js import api
from nats.js.kv import KeyValue

from headrace.broker.connection import Connection, Retry
from headrace.broker.subjects import RunNames
from headrace.errors import BrokerError, FencedError

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_OBJECT_S = 30.0
"""Limit of one file: the client waits for ever for chunks that a lost broker did not send."""
RUNNING, FINISHED = "running", "finished"


class Current(msgspec.Struct, frozen=True, kw_only=True):
    """The version that actors should serve, and how the run stands."""

    lineage: int
    version: int
    phase: str = RUNNING
    """`running` or `finished`."""


class RunState:
    """Reads and writes the state bucket of one run."""

    def __init__(self, connection: Connection, names: RunNames) -> None:
        self._connection = connection
        self._names = names
        self._bucket: KeyValue | None = None

    async def create(self) -> None:
        """Create the bucket; an existing one is kept."""
        async for attempt in Retry(self._connection, "creating the state bucket"):
            with attempt:
                self._bucket = await self._connection.js.create_key_value(
                    api.KeyValueConfig(bucket=self._names.state_bucket, history=1, direct=True)
                )

    async def _kv(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await self._connection.js.key_value(self._names.state_bucket)
        return self._bucket

    async def get(self, key: str) -> bytes | None:
        """Value of a key, or None."""
        async for attempt in Retry(self._connection, f"reading the run's {key}"):
            with attempt:
                try:
                    return (await (await self._kv()).get(key)).value
                except nats.js.errors.NotFoundError:
                    return None
        raise AssertionError("unreachable")

    async def put(self, key: str, value: bytes) -> None:
        """Write a key."""
        async for attempt in Retry(self._connection, f"writing the run's {key}"):
            with attempt:
                await (await self._kv()).put(key, value)

    async def raise_lineage(self) -> int:
        """Become the newest learner: compare-and-set the lineage to one above the last.

        Where the broker's answer was lost it may rise by two, which fences as well.

        Raises:
            BrokerError: other learners kept winning the race.
        """
        async for attempt in Retry(self._connection, "raising the lineage"):
            with attempt:
                return await self._raise_lineage()
        raise AssertionError("unreachable")

    async def _raise_lineage(self) -> int:
        kv = await self._kv()
        for _ in range(20):
            try:
                entry = await kv.get("lineage")
                lineage, revision = int(entry.value or b"0") + 1, entry.revision
                await kv.update("lineage", str(lineage).encode(), last=revision)
            except nats.js.errors.KeyNotFoundError:
                lineage = 1
                try:
                    await kv.create("lineage", b"1")
                except nats.js.errors.KeyWrongLastSequenceError:
                    continue
            except nats.js.errors.KeyWrongLastSequenceError:
                continue
            return lineage
        raise BrokerError("the lineage could not be raised: other learners start at the same time")

    async def check_lineage(self, lineage: int) -> None:
        """Stop a learner that was replaced.

        Raises:
            FencedError: a newer learner has started.
        """
        current = int(await self.get("lineage") or b"0")
        if current != lineage:
            raise FencedError(
                f"learner lineage {lineage} was replaced by {current} in run {self._names.run!r}; "
                "this one stops"
            )

    async def current(self) -> Current | None:
        """Version that actors should serve; None before the first weights."""
        data = await self.get("current")
        return None if data is None else msgspec.json.decode(data, type=Current)

    async def set_current(self, current: Current) -> None:
        """Announce a version, after its weights can be pulled."""
        await self.put("current", msgspec.json.encode(current))

    async def put_model_files(self, folder: Path) -> None:
        """Store the tokenizer and model configuration of a Hugging Face folder."""
        paths = [folder / name for name in MODEL_FILES if (folder / name).exists()]
        for path in paths:
            async for attempt in Retry(self._connection, f"storing the model's {path.name}"):
                with attempt:
                    store = await self._connection.js.create_object_store(
                        bucket=self._names.model_bucket
                    )
                    await store.put(path.name, path.read_bytes())

    async def fetch_model_files(self, folder: Path) -> None:
        """Write the run's tokenizer and model configuration into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        bucket, names = self._names.model_bucket, list[str]()
        async for attempt in Retry(self._connection, "listing the model's files"):
            with attempt:
                async with asyncio.timeout(_OBJECT_S):
                    store = await self._connection.js.object_store(bucket)
                    names = [info.name for info in await store.list()]
        for name in names:
            async for attempt in Retry(self._connection, f"fetching the model's {name}"):
                with attempt, (folder / Path(name).name).open("wb") as sink:
                    async with asyncio.timeout(_OBJECT_S):
                        store = await self._connection.js.object_store(bucket)
                        await store.get(name, writeinto=sink)
