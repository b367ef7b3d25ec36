"""A log that is much smaller than the run."""

import asyncio
from pathlib import Path

import pytest

from headrace.broker.runlog import RunLog
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from tests.chaos.commands import WAIT_S, Commands
from tests.integration.learner.scripted import acting

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
