"""The learner as its public command, on a real broker, with a scripted actor."""

import asyncio
import json
import shlex
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest

from headrace.broker.records import Failed, decode
from headrace.broker.runlog import RunLog
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.learner.history import read_history
from headrace.monitor.progress import read_summary
from tests.chaos.commands import HEADRACE, WAIT_S, Commands, kill, seeded
from tests.integration.learner.scripted import acting

pytestmark = [pytest.mark.nats, pytest.mark.slow]
STEPS = 16


def final_hash(run: Commands, steps: int) -> str:
    path = run.run_dir / "checkpoints" / f"step-{steps:06d}" / "resume" / "trainer.json"
    return str(msgspec.json.decode(path.read_bytes())["weights_hash"])


def at_least(run: Commands, steps: int) -> bool:
    return run.steps() >= steps


async def ended(process: "subprocess.Popen[bytes]") -> int:
    return await asyncio.to_thread(process.wait, WAIT_S)


async def test_a_learner_killed_again_and_again_trains_what_a_quiet_one_trains(
    tmp_path: Path,
) -> None:
    chance = seeded()
    with Commands(
        tmp_path / "run", f"learner.steps={STEPS}", "learner.checkpoint_every=3", "probes.tasks=2"
    ) as run:
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port), acting(run.url, "run"):
            reached = 0
            for _ in range(4):
                learner = run.start("learner")
                reached = chance.randint(reached, reached + 3)
                await asyncio.to_thread(run.until, partial(at_least, run, reached), learner)
                kill(learner)
                reached = max(reached, run.steps())
                if reached >= STEPS - 3:
                    break
            assert await ended(run.start("learner")) == 0, run.output("learner")
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
                await RunLog.attach(connection, names, deadline_s=WAIT_S)
                # garbage takes a slot before any actor can
                await connection.js.publish(names.sample(0, 0), b"\xc1 not a record")
                assert await ended(learner) == 0, run.output("learner")
                dead = await connection.js.get_last_msg(names.dead_stream, names.dead_letter(0, 0))
                assert dead.data == b"\xc1 not a record"
                kept = [entry async for entry in read_history(run.config())]
            ledger = await asyncio.to_thread(run.ledger)
        assert [entry.seq for entry in kept] == list(range(1, len(kept) + 1))
        assert next(e.data for e in kept if e.subject == names.sample(0, 0)) == dead.data
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
            assert await ended(learner) == 1
            failed = [
                decode(entry.data, Failed, where=entry.subject)
                async for entry in read_history(run.config())
                if ".sample." in entry.subject
            ]
        last = run.output("learner").splitlines()[-1]
        assert "no reward spread" in last
        assert "parity" in last
        assert len(failed) >= 4 * 4, "every slot of the groups that were filtered in a row"
        assert {(f.kind, f.actor, f.side) for f in failed} == {
            ("no_actor", "learner", "environment")
        }


async def test_a_batch_can_be_passed_over_and_the_ledger_and_the_replay_show_it(
    tmp_path: Path,
) -> None:
    settings = ["learner.steps=3", "learner.keep_checkpoints=1", "probes.tasks=0"]
    with Commands(tmp_path / "run", *settings) as run:
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port):
            learner = run.start("learner")
            await asyncio.to_thread(run.until, lambda: run.steps() >= 0, learner)
            skip = await asyncio.to_thread(
                run.call, "skip", str(run.run_dir), "--step", "2", "--reason", "poison"
            )
            assert skip.returncode == 0, skip.stderr
            async with acting(run.url, "run") as connection:
                assert await ended(learner) == 0, run.output("learner")
                log = await RunLog.attach(connection, RunNames("run"))
                assert await log.last(RunNames("run").step) is None, "purged with its checkpoint"
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
    disk, ledger = tmp_path / "disk", tmp_path / "ledger"
    with Commands(
        disk / "run",
        f"model.path={tmp_path / 'tiny-llama'}",
        "learner.steps=4",
        "learner.checkpoint_every=1",
        "probes.tasks=0",
    ) as run:
        learner = shlex.join([*HEADRACE, "learner", *run.items])
        on_a_small_disk = f"""
            mount -t tmpfs -o size=4m headrace-test {disk} || exit
            {learner}; echo "ended with $?" >&2
            mount -o remount,size=64m {disk} || exit
            {learner}; echo "ended with $?" >&2
            {shlex.join([*HEADRACE, "ledger", str(run.run_dir), "--json"])} > {ledger}
        """
        # in name spaces of its own any user may mount; where that is forbidden, no jail starts
        inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", on_a_small_disk]
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port), acting(run.url, "run"):
            assert await ended(run.spawn("learner", inside)) == 0, run.output("learner")
        lines = run.output("learner").splitlines()
        first = lines.index("ended with 1")
        assert lines[first - 1].startswith("headrace: error: "), lines[first - 1]
        assert "free space and start again" in lines[first - 1]
        assert lines[-1] == "ended with 0", run.output("learner")
    steps = [json.loads(line)["step"] for line in ledger.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


async def test_a_run_that_asks_for_more_probes_than_there_are_asks_all_and_ends(
    tmp_path: Path,
) -> None:
    settings = ["learner.steps=1", 'domains=[{id="python_functions"}]', "probes.tasks=1000"]
    with Commands(tmp_path / "run", *settings) as run:
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port), acting(run.url, "run"):
            assert await ended(run.start("learner")) == 0, run.output("learner")
    summary = read_summary(run.run_dir)
    assert summary is not None
    asked = {rate.n for rates in (summary.before, summary.after) for rate in rates.values()}
    assert len(asked) == 1
    assert 50 < asked.pop() < 1000


async def test_a_second_learner_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with Commands(tmp_path / "run", "learner.steps=3", "probes.tasks=0") as run:
        port = int(run.url.rpartition(":")[2])
        async with bundled_server(tmp_path / "nats", port=port):
            learner = run.start("learner")
            await asyncio.to_thread(run.until, partial(at_least, run, 0), learner)
            second = await asyncio.to_thread(run.call, "learner", str(run.run_dir))
            assert second.returncode == 2
            assert f"a learner of run 'run' is alive (pid {learner.pid}" in second.stderr
            async with acting(run.url, "run"):
                assert await ended(learner) == 0, run.output("learner")
