"""`headrace doctor` as a whole, on this machine."""

import json
import subprocess
from pathlib import Path

import pytest

from headrace.broker.server import bundled_server
from headrace.config import load
from headrace.doctor import broker
from tests.chaos.commands import HEADRACE, ROOT, free_port


@pytest.mark.nats
@pytest.mark.jail
@pytest.mark.slow
def test_a_machine_that_runs_the_tests_has_nothing_that_fails(tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path}/run", f"broker.url=nats://127.0.0.1:{free_port()}"]
    command = [*HEADRACE, "doctor", "--json", "--run", "examples/tiny.toml", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    findings = json.loads(done.stdout)
    assert [finding for finding in findings if finding["state"] == "failed"] == []
    assert done.returncode == 0
    found = {finding["check"]: finding["found"] for finding in findings}
    assert "AsyncLLM loads" in found["vLLM"]
    assert "11 of 11 limits held" in found["sandbox"]
    assert "stored and acknowledged a message" in found["broker"]
    assert found["broker.url"].endswith("starts the broker there")
    assert found["domains"].startswith("parity:0")
    assert {"python", "torch", "collectives", "memory", "disk", "cores", "GPU"} <= found.keys()
    assert not (tmp_path / "run").exists()


@pytest.mark.nats
async def test_a_broker_that_answers_at_the_address_is_well(tmp_path: Path) -> None:
    import asyncio

    async with bundled_server(tmp_path / "store") as server:
        given = load([], [f"broker.url={server.url}"])
        (found,) = await asyncio.to_thread(broker.address, given)
    assert (found.state, found.found) == ("ok", f"a broker answers at {server.url}")
