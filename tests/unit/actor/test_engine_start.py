"""The start of an engine that does not come up."""

import asyncio
import tempfile
import threading
from pathlib import Path

import pytest

from headrace.actor import engine
from headrace.actor.engine import Engine
from headrace.errors import EngineError


async def start(folder: Path) -> Engine:
    return await Engine.start(
        folder,
        dtype="float32",
        max_model_len=16,
        kv_cache_bytes=1 << 20,
        threads=1,
        max_num_seqs=1,
    )


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(engine, "_environment", lambda *_: {})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


async def test_a_start_that_is_cancelled_leaves_no_folder(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(*_: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        release.wait(60)

    monkeypatch.setattr(engine, "_start_llm", slow)
    starting = asyncio.ensure_future(start(model))
    await asyncio.wait_for(begun.wait(), 60)
    assert list(model.parent.glob("headrace-engine-*"))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    release.set()
    assert not list(model.parent.glob("headrace-engine-*"))


async def test_a_start_that_fails_leaves_no_folder(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such model")

    monkeypatch.setattr(engine, "_start_llm", broken)
    with pytest.raises(EngineError, match="no such model"):
        await start(model)
    assert not list(model.parent.glob("headrace-engine-*"))
