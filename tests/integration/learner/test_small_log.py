"""A log that is much smaller than the run."""

import asyncio
from pathlib import Path

import pytest

from headrace.broker.connection import connected
from headrace.broker.runlog import RunLog
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.learner.machine import Machine
from tests.chaos.commands import WAIT_S, Commands
from tests.integration.learner.scripted import acting
from tests.unit.learner.logs import issued, run_config, trajectory

STEPS = 24
LOG_BYTES = 64 << 20
EVIDENCE = "x" * (60 << 10)


@pytest.mark.nats
@pytest.mark.slow
async def test_a_log_above_half_its_limit_is_checkpointed_and_purged_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    settings = [
        f"learner.steps={STEPS}",
        "learner.batch_groups=8",
        "learner.group_size=8",
        "learner.checkpoint_every=1000",
        "probes.tasks=0",
        f"broker.log_bytes={LOG_BYTES}",
    ]
    with Commands(tmp_path / "run", *settings) as run:
        port = int(run.url.rpartition(":")[2])
        async with (
            bundled_server(tmp_path / "nats", port=port),
            acting(run.url, "run", evidence=EVIDENCE) as connection,
        ):
            learner = run.start("learner")
            code = await asyncio.to_thread(learner.wait, WAIT_S)
            assert code == 0, run.output("learner")
            log = await RunLog.attach(connection, RunNames("run"))
            assert (await log.info()).first_seq > 1
            ledger = await asyncio.to_thread(run.ledger)
        assert [row["step"] for row in ledger] == list(range(1, STEPS + 1))
        samples = sum(row["metrics"]["tokens"] > 0 for row in ledger)
        assert samples == STEPS
        # what was trained is more than the log could ever hold
        assert STEPS * 8 * 8 * len(EVIDENCE) > LOG_BYTES


@pytest.mark.nats
async def test_a_slot_stays_decided_when_the_log_is_purged_while_its_group_is_open(
    tmp_path: Path,
) -> None:
    names = RunNames("run")
    async with (
        bundled_server(tmp_path) as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await RunLog.create(connection, names, max_bytes=LOG_BYTES)
        machine = Machine(run_config())
        await log.append(run_config(), after=0, message_id="config")
        await log.append(issued(0, seen=1), after=0, message_id="issued")
        assert await log.decide(trajectory(0, 1, 1.0), limit=9999, domain="d")
        for entry in await log.read(0):
            machine.apply(entry)
        await log.purge_to(machine.state.purgeable)
        assert (await log.info()).first_seq == 2, "what lies before the open group went"
        assert not await log.decide(trajectory(0, 1, 0.0), limit=9999, domain="d")
