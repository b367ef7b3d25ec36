"""The learner as its public command, on a real broker, with a scripted actor."""

import asyncio
import random
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.chaos.commands import Commands, kill
from tests.integration.learner.scripted import acting

from headrace.broker.records import Failed, decode
from headrace.broker.runlog import RunLog
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.learner import archive

pytestmark = [pytest.mark.nats, pytest.mark.slow]
STEPS = 16


def final_hash(run: Commands, steps: int) -> str:
    path = run.run_dir / "checkpoints" / f"step-{steps:06d}" / "resume" / "trainer.json"
    return str(msgspec.json.decode(path.read_bytes())["weights_hash"])


def at_least(run: Commands, steps: int) -> bool:
    return run.steps() >= steps


async def ended(process: "subprocess.Popen[bytes]", deadline_s: float) -> int:
    return await asyncio.to_thread(process.wait, deadline_s)


async def command(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv)
    assert await process.wait() == 0


async def test_a_learner_killed_again_and_again_trains_what_a_quiet_one_trains(
    tmp_path: Path,
) -> None:
    with Commands(
        tmp_path / "run", f"learner.steps={STEPS}", "learner.checkpoint_every=3", "probes.tasks=2"
    ) as run:
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port), acting(run.url, "run"):
            reached = 0
            for _ in range(4):
                learner = run.start("learner")
                reached = random.randint(reached, reached + 3)
                await asyncio.to_thread(
                    run.until, partial(at_least, run, reached), learner, deadline_s=90
                )
                kill(learner)
                reached = max(reached, run.steps())
                if reached >= STEPS - 3:
                    break
            assert await ended(run.start("learner"), 120) == 0, run.output("learner")
            ledger = await asyncio.to_thread(run.ledger)
            replay = await asyncio.to_thread(run.call, "replay", str(run.run_dir))
        assert [row["step"] for row in ledger] == list(range(1, STEPS + 1))
        trained = [ordinal for row in ledger for ordinal in row["trained"]]
        assert len(trained) == len(set(trained))
        assert replay.returncode == 0, replay.stderr
        assert final_hash(run, STEPS) == ledger[-1]["weights_hash"]
        assert final_hash(run, STEPS) in replay.stdout


async def test_a_corrupt_record_fails_its_slot_is_kept_aside_and_loses_nothing(
    tmp_path: Path,
) -> None:
    with Commands(tmp_path / "run", "learner.steps=3", "probes.tasks=0") as run:
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port):
            names = RunNames("run")
            learner = run.start("learner")
            async with acting(run.url, "run", temperature=1.0) as connection:
                log = await RunLog.attach(connection, names, deadline_s=60)
                # garbage takes a slot before any actor can
                await connection.js.publish(names.sample(0, 0), b"\xc1 not a record")
                assert await ended(learner, 120) == 0, run.output("learner")
                dead = await connection.js.get_last_msg(names.dead_stream, names.dead_letter(0, 0))
                assert dead.data == b"\xc1 not a record"
                assert (await log.info()).first_seq > 0
            ledger = await asyncio.to_thread(run.ledger)
        assert "0.0" in [slot for row in ledger for slot in row["failed"]]
        assert len(ledger) == 3


async def test_slots_without_an_actor_are_decided_by_their_deadline(tmp_path: Path) -> None:
    with Commands(
        tmp_path / "run",
        "learner.steps=1",
        "probes.tasks=0",
        "attempts.slot_deadline_s=1",
        "learner.max_filtered=3",
    ) as run:
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port):
            learner = run.start("learner")
            assert await ended(learner, 90) == 1
        assert "had no reward spread: parity (0 of 0 succeeded)" in run.output("learner")
        failed = [
            decode(entry.data, Failed, where="")
            for entry in archive.read(run.run_dir / "archive")
            if ".sample." in entry.subject
        ]
        assert {(f.kind, f.actor) for f in failed} <= {("no_actor", "learner")}


async def test_a_batch_can_be_passed_over_and_the_ledger_and_the_replay_show_it(
    tmp_path: Path,
) -> None:
    with Commands(tmp_path / "run", "learner.steps=3", "probes.tasks=0") as run:
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port):
            learner = run.start("learner")
            await asyncio.to_thread(run.until, lambda: run.steps() >= 0, learner, deadline_s=90)
            skip = await asyncio.to_thread(
                run.call, "skip", str(run.run_dir), "--step", "2", "--reason", "poison"
            )
            assert skip.returncode == 0, skip.stderr
            async with acting(run.url, "run"):
                assert await ended(learner, 120) == 0, run.output("learner")
            late = await asyncio.to_thread(
                run.call, "skip", str(run.run_dir), "--step", "2", "--reason", "late"
            )
            assert late.returncode == 2
            assert "the ledger ends at step 3" in late.stderr
            ledger = await asyncio.to_thread(run.ledger)
            replay = await asyncio.to_thread(run.call, "replay", str(run.run_dir))
        assert [row["skipped"] for row in ledger] == [False, True, False]
        assert ledger[0]["weights_hash"] == ledger[1]["weights_hash"] != ledger[2]["weights_hash"]
        assert replay.returncode == 0, replay.stderr


async def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    await command("mount", "-t", "tmpfs", "-o", "size=4m", "headrace-test", str(small))
    try:
        with Commands(
            small / "run",
            f"model.path={tmp_path / 'tiny-llama'}",
            "learner.steps=4",
            "learner.checkpoint_every=1",
            "probes.tasks=0",
        ) as run:
            port = int(run.url.rpartition(":")[2])
            async with bundled_server(tmp_path / "nats", port=port), acting(run.url, "run"):
                assert await ended(run.start("learner"), 90) == 1
                last = run.output("learner").splitlines()[-1]
                assert last.startswith("headrace: error: "), last
                assert "free space and start again" in last
                await command("mount", "-o", "remount,size=64m", str(small))
                assert await ended(run.start("learner"), 120) == 0, run.output("learner")
                ledger = await asyncio.to_thread(run.ledger)
            assert [row["step"] for row in ledger] == [1, 2, 3, 4]
    finally:
        await command("umount", "-l", str(small))
