"""`headrace train` from its start over Ctrl-C to the closing table, as its user meets it."""

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.commands import WAIT_S, Commands, Process, family, free_port, processes

pytestmark = [pytest.mark.vllm, pytest.mark.jail, pytest.mark.nats, pytest.mark.slow]
STEPS = 16
"""Enough that the run goes on when the slower of two engines has started."""
BATCH = 4
WINDOW_STEPS = 3
"""Steps after which every group that was outstanding is in the ledger."""
ACK_WAIT_S = 60
"""A task that is held was kept alive at most a third of this ago, and comes back after it unasked;
one that was handed back just before the broker stopped does so too, as if it were still held."""


@dataclass(frozen=True)
class Story:
    """What was seen of one run, from which the tests below each take their part."""

    status: dict[str, Any]
    """In the middle of the run."""
    scraped: str
    """What the learner served to Prometheus then."""
    members: set[Process]
    """Every process of the run at that time."""
    held: list[int]
    """Groups that an actor held when it was asked to stop."""
    left: int
    """Its exit code."""
    back: dict[str, Any]
    """Status after it had ended, with one actor that is not it."""
    passed_s: float
    """Seconds from then until the ledger had passed every group that it held."""
    interrupted: int
    """Exit code after Ctrl-C."""
    survivors: list[str]
    """Command lines of the run's processes after that."""
    steps: int
    """Steps when it was interrupted."""
    first: str
    """Output until then."""
    resumed: int
    second: str
    again: "subprocess.CompletedProcess[str]"
    changed: "subprocess.CompletedProcess[str]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    settings = [
        f"learner.steps={STEPS}",
        "learner.group_size=16",  # so that tasks wait while two of them are held
        f"attempts.ack_wait_s={ACK_WAIT_S}",
        "probes.tasks=4",
        f"monitor.prometheus_port={free_port()}",
    ]
    with Commands(tmp_path_factory.mktemp("train") / "run", *settings) as commands:
        yield commands


@pytest.fixture(scope="module")
def story(run: Commands) -> Story:
    train, joined = run.start("train"), run.start("actor")
    run.until(lambda: run.steps() >= 1, train)
    status = busy(run, joined, train)
    scraped = scrape(run)
    held = next(item["held"] for item in status["processes"] if item["pid"] == joined.pid)
    before, members = run.steps(), family(train.pid)
    asked = time.monotonic()
    joined.send_signal(signal.SIGTERM)
    left = joined.wait(WAIT_S)
    back = without(run, joined, train)
    run.until(lambda: run.steps() >= before + WINDOW_STEPS, train)
    passed_s = time.monotonic() - asked

    train.send_signal(signal.SIGINT)
    interrupted = train.wait(WAIT_S)
    now = processes()
    survivors = [
        command
        for process, (_, command) in now.items()
        if process in members or str(run.run_dir) in command
    ]
    steps, first = run.steps(), run.output("train")

    resumed = run.start("train").wait(WAIT_S)
    second = run.output("train")[len(first) :]
    again = run.call("train", str(run.run_dir))
    changed = run.call("train", *run.items, "learner.lr=0.5")
    return Story(
        status=status,
        scraped=scraped,
        members=members,
        held=held,
        left=left,
        back=back,
        passed_s=passed_s,
        interrupted=interrupted,
        survivors=survivors,
        steps=steps,
        first=first,
        resumed=resumed,
        second=second,
        again=again,
        changed=changed,
    )


def scrape(run: Commands) -> str:
    port = run.config().monitor.prometheus_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def busy(
    run: Commands, actor: "subprocess.Popen[bytes]", train: "subprocess.Popen[bytes]"
) -> dict[str, Any]:
    """Status at a moment when an actor holds tasks and more are waiting for it.

    A step is in the ledger before its version is published, and a broker whose lease is late is
    not listed for a moment.
    """
    status: dict[str, Any] = {}

    def is_busy() -> bool:
        status.update(run.status())
        held = [item["held"] for item in status["processes"] if item["pid"] == actor.pid]
        roles = {item["role"] for item in status["processes"]}
        return (
            any(held)
            and status["queues"]["default"]["waiting"] > 0
            and status["version"] >= 1
            and {"broker", "learner", "actor"} <= roles
        )

    run.until(is_busy, train)
    return status


def without(
    run: Commands, actor: "subprocess.Popen[bytes]", train: "subprocess.Popen[bytes]"
) -> dict[str, Any]:
    """Status once exactly one actor is listed that is another one.

    A lease that is late is not listed for a moment, and one that is not released lapses.
    """
    status: dict[str, Any] = {}

    def is_without() -> bool:
        status.update(run.status())
        pids = [item["pid"] for item in status["processes"] if item["role"] == "actor"]
        return len(pids) == 1 and actor.pid not in pids

    run.until(is_without, train)
    return status


def test_progress_is_shown_in_lines_where_there_is_no_terminal(story: Story) -> None:
    line = re.compile(
        rf"^\d\d:\d\d:\d\d training version \d+ step \d+/{STEPS}  groups \d+ issued \d+ complete "
        r"\d+ trained \d+ filtered  .*parity \d+ % of \d+  tokens/s \d+ generated \d+ trained  "
        r"lag .*%  left ",
        re.MULTILINE,
    )
    assert line.search(story.first), story.first


def test_the_status_of_a_run_lists_its_processes_by_their_real_ids(story: Story) -> None:
    listed = {item["role"]: item["pid"] for item in story.status["processes"]}
    assert {"broker", "learner", "actor"} <= listed.keys()
    assert {listed["broker"], listed["learner"]} <= {member.pid for member in story.members}
    assert story.status["version"] >= 1
    assert story.status["phase"] == "running"


def test_the_learner_serves_success_by_domain_while_it_trains(story: Story) -> None:
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(story.scraped)
        for sample in family.samples
    }
    assert samples["headrace_run_info", "run"] == 1
    assert samples["headrace_steps_total",] >= 1
    assert 0 <= samples["headrace_success_ratio", "parity"] <= 1
    assert samples["headrace_samples_total", "parity"] > 0
    assert samples["headrace_step_grad_norm",] > 0


def test_log_lines_say_which_group_domain_and_version_they_are_about(
    story: Story, run: Commands
) -> None:
    lines = [
        json.loads(line)
        for path in (run.run_dir / "logs").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {line["role"] for line in lines} == {"supervisor", "broker", "learner", "actor"}
    assert {line["run"] for line in lines} == {run.config().run_name}
    played = r"group \d+ of"
    trained = r"step \d+ |weights \d+ |sampling at version"
    rules = {
        played: {"group", "domain", "version"},
        trained: {"version"},
        r"group \d+ (has no task|handed back)": {"group", "domain"},
        r"sample \d+\.\d+": {"group", "sample", "domain"},
    }
    seen = set()
    for line in lines:
        for pattern, keys in rules.items():
            if re.match(pattern, line["event"]):
                seen.add(pattern)
                assert keys <= line.keys(), line
    assert {played, trained} <= seen
    groups = {line["group"] for line in lines if re.match(played, line["event"])}
    assert groups & {ordinal for row in run.ledger() for ordinal in row["trained"]}


def test_an_actor_that_is_asked_to_stop_hands_its_tasks_to_others_at_once(story: Story) -> None:
    assert story.held
    assert story.left == 128 + signal.SIGTERM
    assert story.passed_s < ACK_WAIT_S * 2 / 3
    [left] = [item for item in story.back["processes"] if item["role"] == "actor"]
    assert left["pid"] in {member.pid for member in story.members}, "the other one alone is listed"


def test_ctrl_c_stops_the_run_and_leaves_no_process_of_it(story: Story) -> None:
    assert story.interrupted == 130
    assert story.survivors == []
    assert 1 <= story.steps < STEPS, "it was stopped in the middle"
    assert "goes on where it stopped" in story.first


def test_the_same_command_goes_on_where_it_stopped(story: Story, run: Commands) -> None:
    assert story.resumed == 0, story.second
    ledger = run.ledger()
    assert [row["step"] for row in ledger] == list(range(1, STEPS + 1))
    # a lineage is passed over where the answer that gave it was lost
    assert len({row["lineage"] for row in ledger}) == 2


def test_the_closing_table_says_what_was_reached_and_what_it_cost(
    story: Story, run: Commands
) -> None:
    table = story.second[story.second.index("held-out success") :]
    assert re.search(r"domain .* before .* after", table)
    assert re.search(r"parity .* of 4, \d+ % .* of 4, \d+ %", table)
    assert re.search(rf"groups +{STEPS * BATCH} trained, \d+ filtered", table)
    assert re.search(r"failed +\d+ environment, \d+ model", table)
    assert re.search(r"staleness +0: \d+ %", table)
    assert re.search(r"time .*train: \d+ s", table)
    checkpoint = run.run_dir / "checkpoints" / f"step-{STEPS:06d}"
    assert (checkpoint / "config.json").is_file()
    assert str(checkpoint) in "".join(table.split()), "the path may be folded"


def test_the_report_of_a_run_that_trained_has_data_in_every_chart(
    story: Story, run: Commands
) -> None:
    made = run.call("report", str(run.run_dir))
    assert made.returncode == 0, made.stderr
    page = (run.run_dir / "report.html").read_text(encoding="utf-8")
    assert page.count('<svg class="chart"') == 12
    assert "no data yet" not in page
    assert "parity" in page


def test_the_transcript_of_a_sample_that_was_trained_can_be_read(
    story: Story, run: Commands
) -> None:
    listed = run.call("trajectories", str(run.run_dir), "--step", "1", "--json")
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert {row["step"] for row in rows} == {1}
    shown = run.call("trajectories", str(run.run_dir), rows[0]["sample"])
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^sampled: tokens \d+-\d+, version 0, ", shown.stdout, re.MULTILINE)
    assert re.search(r"^verdict: score [01]\.00, ", shown.stdout, re.MULTILINE)


def test_a_finished_run_is_only_shown_again(story: Story, run: Commands) -> None:
    assert story.again.returncode == 0, story.again.stderr
    assert "the run is complete" in story.again.stdout
    assert story.again.stdout.splitlines()[-3:] == story.second.splitlines()[-3:]


def test_a_changed_configuration_is_refused_with_the_difference(story: Story) -> None:
    assert story.changed.returncode == 2
    assert "learner.lr: 0.001 -> 0.5" in story.changed.stderr
    assert story.changed.stdout == ""
