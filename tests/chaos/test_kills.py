"""Every role dies by SIGKILL in the middle of its work, and nothing is lost or trained twice."""

import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.chaos.commands import WAIT_S, Commands, kill, seeded, shuffled

STEPS = 32
BATCH = 4
ROLES = ["broker", "learner", "actor"]


def holding(run: Commands, actors: "list[subprocess.Popen[bytes]]") -> bool:
    return any(run.held_by(actor) for actor in actors)


def beyond(run: Commands, steps: int) -> bool:
    return run.steps() > steps


@pytest.mark.vllm
@pytest.mark.jail
@pytest.mark.nats
@pytest.mark.slow
def test_after_a_kill_of_every_role_the_ledger_is_whole_and_the_weights_are_those_of_a_quiet_run(
    tmp_path: Path,
) -> None:
    settings = [f"learner.steps={STEPS}", "attempts.ack_wait_s=5", "probes.tasks=4"]
    chance = seeded()
    with Commands(tmp_path / "run", *settings) as run:
        processes = run.start_in_order(shuffled(ROLES, chance))
        run.until(lambda: run.steps() >= 1, processes["learner"])
        second = run.start("actor")  # joins while the run goes on

        for role in shuffled(ROLES, chance):
            victim = processes[role]
            # broker and learner are in mid-work while samples are being made for them
            workers = [victim] if role == "actor" else [processes["actor"], second]
            run.until(partial(holding, run, workers), processes["learner"])
            assert victim.poll() is None, f"the {role} lives until it is killed"
            assert run.steps() < STEPS, "the run is not over"
            kill(victim)
            before = run.steps()
            if role != "actor":  # the second one does what this one held
                processes[role] = run.start(role)
            run.until(partial(beyond, run, before), processes["learner"])

        assert processes["learner"].wait(WAIT_S) == 0, run.output("learner")
        assert second.wait(WAIT_S) == 0, run.output("actor")

        ledger = run.ledger()
        assert [row["step"] for row in ledger] == list(range(1, STEPS + 1)), "no hole"
        trained = [ordinal for row in ledger for ordinal in row["trained"]]
        filtered = [ordinal for row in ledger for ordinal in row["filtered"]]
        assert len(trained) == len(set(trained)) == STEPS * BATCH, "no group twice"
        assert not set(trained) & set(filtered)
        # a lineage is passed over where the answer that gave it was lost
        assert len({row["lineage"] for row in ledger}) == 2, "the second learner went on"

        replay = run.call("replay", str(run.run_dir))
        assert replay.returncode == 0, replay.stderr
        checkpoint = run.run_dir / "checkpoints" / f"step-{STEPS:06d}" / "resume" / "trainer.json"
        final = msgspec.json.decode(checkpoint.read_bytes())["weights_hash"]
        assert final == ledger[-1]["weights_hash"]
        assert final in replay.stdout
