"""The rules of the state machine over the run log."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.records import Failed, Skip, encode
from headrace.broker.runlog import Entry
from headrace.errors import LogError
from headrace.learner.issuer import room
from headrace.learner.machine import Corrupt, Machine, Snapshot
from tests.unit.learner.logs import (
    NAMES,
    Log,
    failed,
    issued,
    run_config,
    simulate,
    step,
    trajectory,
)

configs = st.builds(
    run_config,
    batch_groups=st.integers(1, 3),
    max_versions=st.integers(0, 3),
    group_size=st.integers(2, 3),
    steps=st.integers(1, 5),
)
seeds = st.integers(0, 2**32)


def scores(seed: int):
    """Scores that depend on the slot alone: a third of the groups are alike, some slots fail."""

    def score(group: int, index: int) -> float | None:
        rng = random.Random(f"{seed}/{group}")
        kind = rng.random()
        slot = random.Random(f"{seed}/{group}/{index}")
        if slot.random() < 0.1:
            return None
        return 1.0 if kind < 0.3 else float(slot.random() < 0.5)

    return score


def trained(log: Log) -> list[list[int]]:
    return [batch.ordinals for batch in log.batches][: log.machine.state.version]


@given(configs, seeds, seeds)
@settings(max_examples=60, deadline=None)
def test_every_group_is_trained_once_or_filtered_once_and_no_batch_is_short(
    config, seed, timing
) -> None:
    log = simulate(config, scores(seed), random.Random(timing))
    ordinals = [ordinal for batch in trained(log) for ordinal in batch]
    filtered = [ordinal for batch in log.batches for ordinal in batch.filtered]
    assert len(set(ordinals)) == len(ordinals) == config.steps * config.batch_groups
    assert len(set(filtered)) == len(filtered)
    assert not set(ordinals) & set(filtered)
    assert ordinals == sorted(ordinals), "batches are formed in ordinal order"


@given(configs, seeds, seeds, seeds)
@settings(max_examples=60, deadline=None)
def test_batches_do_not_depend_on_the_order_of_arrival(config, seed, one, other) -> None:
    first = simulate(config, scores(seed), random.Random(one))
    second = simulate(config, scores(seed), random.Random(other))
    assert trained(first) == trained(second)


@given(configs, seeds, seeds)
@settings(max_examples=60, deadline=None)
def test_no_token_is_trained_beyond_the_staleness_bound(config, seed, timing) -> None:
    log = simulate(config, scores(seed), random.Random(timing))
    for batch in log.batches:
        for group in batch.groups:
            for sample in group.trajectories:
                oldest = min(span.value for span in sample.versions)
                assert batch.version - 1 - oldest <= config.max_versions


@given(st.integers(1, 3), st.integers(2, 3), st.integers(1, 5), seeds, seeds)
@settings(max_examples=60, deadline=None)
def test_at_staleness_zero_the_batches_are_those_of_a_plain_loop(
    batch_groups, group_size, steps, seed, timing
) -> None:
    config = run_config(
        batch_groups=batch_groups, max_versions=0, group_size=group_size, steps=steps
    )
    score = scores(seed)

    def informative(group: int) -> bool:
        valid = [v for i in range(group_size) if (v := score(group, i)) is not None]
        return len(set(valid)) > 1

    plain: list[list[int]] = []
    ordinal = 0
    for _ in range(steps):
        chosen: list[int] = []
        while len(chosen) < batch_groups:
            if informative(ordinal):
                chosen.append(ordinal)
            ordinal += 1
        plain.append(chosen)
    log = simulate(config, score, random.Random(timing))
    assert trained(log) == plain
    for batch in log.batches:
        for group in batch.groups:
            assert group.issued.version == batch.version - 1, "sampled by the newest weights"


@given(configs, seeds, seeds)
@settings(max_examples=30, deadline=None)
def test_a_snapshot_at_any_record_continues_as_if_never_interrupted(config, seed, timing) -> None:
    log = simulate(config, scores(seed), random.Random(timing))
    whole = Machine(config)
    expected = []
    states = []
    for entry in log.entries:
        whole.apply(entry)
        while (batch := whole.take_batch()) is not None:
            expected.append(batch.ordinals)
        states.append((msgspec.msgpack.encode(whole.state), len(expected)))
    cut = random.Random(timing).randrange(len(states))
    encoded, already = states[cut]
    resumed = Machine(config, msgspec.msgpack.decode(encoded, type=Snapshot))
    batches = []
    for entry in log.entries[cut + 1 :]:
        resumed.apply(entry)
        while (batch := resumed.take_batch()) is not None:
            batches.append(batch.ordinals)
    assert batches == expected[already:]
    assert msgspec.msgpack.encode(resumed.state) == states[-1][0]


def test_a_slot_is_decided_by_its_first_record() -> None:
    log = Log(run_config())
    log.extend([issued(0), trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)])
    late = trajectory(0, 0, 0.0)
    log.machine.apply(Entry(len(log.entries) + 1, NAMES.sample(0, 0), encode(late)))
    group = log.machine.state.open[0]
    assert [t.verdict.score for t in group.trajectories] == [1.0, 0.0]


def test_a_batch_waits_for_every_lower_ordinal() -> None:
    log = Log(run_config())
    log.extend([issued(i) for i in range(3)])
    for group in (1, 2):
        log.extend([trajectory(group, 0, 1.0), trajectory(group, 1, 0.0)])
    assert log.machine.take_batch() is None
    log.extend([trajectory(0, 0, 1.0), trajectory(0, 1, 1.0)])
    batch = log.machine.take_batch()
    assert batch is not None
    assert (batch.ordinals, batch.filtered) == ([1, 2], [0])


def test_a_failed_slot_completes_its_group_but_is_no_reward() -> None:
    log = Log(run_config(batch_groups=1, group_size=3))
    log.extend([issued(0, size=3), trajectory(0, 0, 0.0), trajectory(0, 1, 0.0), failed(0, 2)])
    assert log.machine.take_batch() is None, "two equal scores and a failure do not differ"
    log.extend([issued(1, size=3), trajectory(1, 0, 1.0), trajectory(1, 1, 0.0), failed(1, 2)])
    batch = log.machine.take_batch()
    assert batch is not None
    assert (batch.ordinals, batch.filtered, batch.failed) == ([1], [0], ["1.2", "0.2"])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", encode(failed(9, 9))])
def test_a_corrupt_record_counts_as_a_failure_of_its_slot(data: bytes) -> None:
    kept: list[Corrupt] = []
    log = Log(run_config())
    log.machine.on_corrupt = kept.append
    log.append(issued(0))
    log.machine.apply(Entry(3, NAMES.sample(0, 1), data))
    sample = log.machine.state.open[0].samples[1]
    assert isinstance(sample, Failed)
    assert (sample.side, sample.kind) == ("environment", "corrupt_record")
    assert kept[0].entry.data == data


def test_a_sample_that_precedes_its_group_decides_its_slot_when_the_group_is_issued() -> None:
    log = Log(run_config(batch_groups=1))
    log.append(trajectory(0, 0, 1.0))
    log.extend([issued(0), trajectory(0, 1, 0.0)])
    batch = log.machine.take_batch()
    assert batch is not None
    assert batch.ordinals == [0]


@pytest.mark.parametrize("slot", ["x.y", "1", "0.0.0", "-1.0"])
def test_a_record_on_no_slot_of_any_group_is_passed_over(slot: str) -> None:
    log = Log(run_config())
    log.append(issued(0))
    log.machine.apply(Entry(3, f"{NAMES.prefix}.log.sample.{slot}", encode(failed(0, 0))))
    assert log.machine.state.open[0].samples == {}
    assert log.machine.state.position == 3


def test_a_sample_below_its_tasks_version_is_refused() -> None:
    log = Log(run_config())
    log.extend([issued(0, version=3), trajectory(0, 0, 1.0, version=2)])
    log.append(trajectory(0, 1, 1.0, version=3))
    samples = log.machine.state.open.get(0)
    assert samples is None, "one valid score has no spread"
    assert log.machine.state.filtered_failed == ["0.0"]


def test_a_probe_never_enters_a_batch_and_never_holds_one_up() -> None:
    log = Log(run_config(batch_groups=1))
    log.extend([issued(0, size=1, purpose="probe"), issued(1)])
    log.extend([trajectory(1, 0, 1.0), trajectory(1, 1, 0.0)])
    batch = log.machine.take_batch()
    assert batch is not None
    assert batch.ordinals == [1]
    log.append(trajectory(0, 0, 1.0))
    assert log.machine.state.probes[0]["d"].successes == 1
    assert log.machine.outstanding == 1


def test_a_ledger_that_differs_from_the_batch_is_fatal() -> None:
    log = Log(run_config(batch_groups=1))
    log.extend([issued(0), trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)])
    batch = log.machine.take_batch()
    assert batch is not None
    wrong = msgspec.structs.replace(step(batch), trained=[5])
    with pytest.raises(LogError, match=r"trained groups \[5\], but the log forms \[0\]"):
        log.append(wrong)


def test_a_record_out_of_sequence_is_fatal() -> None:
    machine = Machine(run_config())
    with pytest.raises(LogError, match="record 2 does not follow position 0"):
        machine.apply(Entry(2, NAMES.config, encode(run_config())))


def test_a_skip_counts_for_a_coming_step_only() -> None:
    log = Log(run_config(batch_groups=1))
    log.extend([issued(0), trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)])
    batch = log.machine.take_batch()
    assert batch is not None
    log.append(step(batch))
    for seq, version in enumerate((1, 2), len(log.entries) + 1):
        skip = Skip(version=version, reason="bad")
        log.machine.apply(Entry(seq, NAMES.skip, encode(skip)))
    assert log.machine.state.skips == {2: "bad"}


def free_room(machine: Machine, *, probes: int = 0, log_bytes: int = 0, limit: int = 1 << 40):
    return room(machine, probes=probes, log_bytes=log_bytes, log_limit=limit, sample=1000)


def test_the_window_is_staleness_plus_one_batches_and_shrinks_at_the_end() -> None:
    assert free_room(Machine(run_config(max_versions=1))).train == 4
    assert free_room(Machine(run_config(max_versions=9, steps=3))).train == 6


def test_nothing_is_issued_that_the_log_could_not_hold() -> None:
    machine = Machine(run_config(batch_groups=5, group_size=10))
    reserve = 8 << 20
    assert free_room(machine, limit=reserve + 100_000).train == 7
    assert free_room(machine, limit=reserve + 10_000).train == 0
    assert free_room(machine, log_bytes=50_000, limit=reserve + 100_000).train == 3


def test_probes_come_before_the_first_training_group_and_after_the_last_step() -> None:
    log = Log(run_config(batch_groups=1, steps=1))
    assert free_room(log.machine, probes=1).probe == 1
    assert free_room(log.machine, probes=1).train == 0
    log.append(issued(0, size=1, purpose="probe"))
    assert free_room(log.machine, probes=1).train == 0, "the probe is still open"
    log.append(trajectory(0, 0, 1.0))
    assert free_room(log.machine, probes=1).train == 1
    log.extend([issued(1), trajectory(1, 0, 1.0), trajectory(1, 1, 0.0)])
    batch = log.machine.take_batch()
    assert batch is not None
    log.append(step(batch))
    assert free_room(log.machine, probes=1).probe == 1
    assert free_room(log.machine, probes=1).train == 0


def test_a_group_with_spread_ends_the_row_of_filtered_ones_before_a_step_does() -> None:
    log = Log(run_config(batch_groups=4))
    for ordinal, right in enumerate((0.0, 0.0, 1.0, 0.0)):
        log.append(issued(ordinal))
        log.extend([trajectory(ordinal, 0, 0.0), trajectory(ordinal, 1, right)])
    assert log.machine.state.totals["filtered"] == 3
    assert log.machine.state.filtered_in_a_row == 1


def test_records_of_open_slots_may_not_be_purged_and_those_before_them_may() -> None:
    log = Log(run_config(batch_groups=4))
    log.append(issued(0, seen=1))
    log.append(issued(1, seen=2))
    log.extend([trajectory(1, 0, 0.0), trajectory(1, 1, 1.0), trajectory(0, 0, 0.0)])
    # group 0 waits for its second slot: its first must stay, to refuse another record of it
    assert log.machine.state.purgeable == 1
    log.append(trajectory(0, 1, 1.0))
    assert log.machine.state.purgeable == log.machine.state.position == len(log.entries)
