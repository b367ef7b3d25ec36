"""Where a run's metrics go: each destination for real, and what happens when one is lost."""

import logging
import os
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.summary.writer.record_writer import RecordWriter

from headrace.configmonitor import Monitor
from headrace.errors import ConfigError, ExportError
from headrace.monitor.exporters.base import Exporters
from headrace.monitor.exporters.prometheus import Prometheus
from headrace.monitor.exporters.tensorboard import TensorBoard
from headrace.monitor.progress import ActorView, Failures, Progress, Success
from tests.chaos.commands import free_port

STEP = {
    "loss": 0.25,
    "grad_norm": 1.5,
    "success/arithmetic": 0.5,
    "seconds/train": 2.0,
    "lag1/ess": 0.9,
    "actors/alive": 2.0,
}
PROGRESS = Progress(
    version=3,
    steps=3,
    total_steps=10,
    issued=31,
    complete=28,
    trained=24,
    filtered=2,
    failed=Failures(environment=1, model=4),
    phase="training",
    success={"arithmetic": Success(n=200, ok=90, ema=0.47), "parity": Success(n=4, ok=1, ema=0.2)},
    generated_tokens_per_s=210.5,
    trained_tokens_per_s=95.0,
    staleness={0: 60, 1: 40},
    updated=1_800_000_000.0,
    waiting={"wait for samples": 12.0},
    actors=[ActorView(id="a1", version=2, status="sampling")],
)


class Lost:
    """A destination that is lost after its first step."""

    name = "Lost"

    def __init__(self):
        self.got = []

    def step(self, version, values, at):
        if self.got:
            raise ExportError("nobody answers")
        self.got.append(version)

    def progress(self, progress):
        pass

    def close(self):
        raise AssertionError("it was dropped")


def test_tensorboard_gets_a_curve_for_each_metric(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    board = TensorBoard(tmp_path)
    board.step(1, {"loss/mean": 0.25}, 5.0)
    board.step(2, {"loss/mean": 0.125}, 6.0)
    board.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    points = [
        (event.step, event.wall_time, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
    ]
    assert points == [(1, 5.0, "loss/mean", 0.25), (2, 6.0, "loss/mean", 0.125)]


def test_a_folder_that_cannot_be_made_stops_the_start_with_one_line(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(ConfigError, match=r"tensorboard cannot be written .*tensorboard=false"):
        Exporters.open(Monitor(), tmp_path, "run", "id")


def test_a_full_disk_is_logged_once_and_stops_nothing(tmp_path, caplog):
    exporters = Exporters.open(Monitor(), tmp_path, "run", "id")
    (board,) = exporters._alive
    assert isinstance(board, TensorBoard)
    board._records.close()
    with Path("/dev/full").open("ab", buffering=0) as full:
        board._records = RecordWriter(full)
        for version in (1, 2, 3):
            exporters.step(version, STEP, 0.0)
    (record,) = caplog.records
    assert "TensorBoard gets no more metrics" in record.getMessage()
    assert "its file cannot be written (No space left on device)" in record.getMessage()


def scrape(port):
    """Samples by name and label values, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): (family.type, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_scrapes_the_state_of_the_run_and_its_latest_step(tmp_path):
    port = free_port()
    exporters = Exporters.open(
        Monitor(tensorboard=False, prometheus_port=port), tmp_path, "first", "id"
    )
    try:
        assert scrape(port) == {("headrace_run_info", "first"): ("gauge", 1.0)}
        exporters.step(2, STEP | {"loss": 9.0}, 1.0)
        exporters.step(3, STEP, 2.0)
        exporters.progress(PROGRESS)
        got = scrape(port)
    finally:
        exporters.close()
    expected = {
        ("headrace_phase", "training"): ("gauge", 1.0),
        ("headrace_phase", "done"): ("gauge", 0.0),
        ("headrace_policy_version",): ("gauge", 3.0),
        ("headrace_steps_total",): ("counter", 3.0),
        ("headrace_groups_trained_total",): ("counter", 24.0),
        ("headrace_groups_filtered_total",): ("counter", 2.0),
        ("headrace_groups_open",): ("gauge", 3.0),
        ("headrace_samples_total", "arithmetic"): ("counter", 200.0),
        ("headrace_samples_succeeded_total", "parity"): ("counter", 1.0),
        ("headrace_success_ratio", "arithmetic"): ("gauge", 0.47),
        ("headrace_success_ratio", "parity"): ("gauge", 0.2),
        ("headrace_samples_failed_total", "environment"): ("counter", 1.0),
        ("headrace_samples_failed_total", "model"): ("counter", 4.0),
        ("headrace_generated_tokens_per_second",): ("gauge", 210.5),
        ("headrace_trained_tokens_total", "1"): ("counter", 40.0),
        ("headrace_learner_seconds_total", "wait for samples"): ("counter", 12.0),
        ("headrace_actor_version", "a1"): ("gauge", 2.0),
        ("headrace_step_version",): ("gauge", 3.0),
        ("headrace_step_loss",): ("gauge", 0.25),
        ("headrace_step_success", "arithmetic"): ("gauge", 0.5),
        ("headrace_step_seconds", "train"): ("gauge", 2.0),
        ("headrace_step_lag_ess", "1"): ("gauge", 0.9),
        ("headrace_step_actors_alive",): ("gauge", 2.0),
    }
    assert {key: got.get(key) for key in expected} == expected


def test_a_port_that_is_taken_stops_the_start_with_one_line(tmp_path):
    port = free_port()
    first = Prometheus("first", "127.0.0.1", port)
    try:
        with pytest.raises(ConfigError, match=rf"prometheus_port {port}: .*in use.*choose another"):
            Exporters.open(Monitor(prometheus_port=port), tmp_path, "second", "id")
    finally:
        first.close()
    # what was free before is free again
    Prometheus("third", "127.0.0.1", port).close()


def test_an_address_that_is_not_of_this_machine_stops_the_start(tmp_path):
    config = Monitor(tensorboard=False, prometheus_port=free_port(), prometheus_address="192.0.2.1")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:\d+ cannot be listened on"):
        Exporters.open(config, tmp_path, "run", "id")


def test_an_exporter_that_fails_is_logged_once_and_dropped_and_the_others_go_on(tmp_path, caplog):
    exporters, lost, port = Exporters(), Lost(), free_port()
    exporters.add(lost)
    exporters.add(Prometheus("run", "127.0.0.1", port))
    with caplog.at_level(logging.WARNING):
        for version in (1, 2, 3):
            exporters.step(version, STEP, 0.0)
    assert lost.got == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "Lost gets no more metrics until the learner starts again: nobody answers"
    ]
    assert scrape(port)["headrace_step_version",] == ("gauge", 3.0)
    exporters.close()


def test_a_client_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'headrace\[wandb\]'"):
        Exporters.open(Monitor(tensorboard=False, wandb_project="p"), tmp_path, "run", "id")


WANDB_START = """
import asyncio, logging, os, signal, sys
from pathlib import Path
from headrace.configmonitor import Monitor
from headrace.errors import ConfigError
from headrace.monitor.exporters.base import Exporters

logging.basicConfig(stream=sys.stdout, format="%(message)s")

async def start(mode):  # in a thread, as the learner does
    config = Monitor(tensorboard=False, wandb_project="p", wandb_mode=mode)
    return await asyncio.to_thread(Exporters.open, config, Path(sys.argv[1]), "first", "abc")

def kill_client():
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
"""

WANDB_STORY = """
try:
    asyncio.run(start("online"))
except ConfigError as error:
    print("refused:", error)
exporters = asyncio.run(start("offline"))
for version in (1, 2):
    exporters.step(version, {"loss": 0.5 / version, "success/parity": 0.25}, 1.0)
exporters.close()

exporters = asyncio.run(start("offline"))  # the learner starts again
exporters.step(3, {"loss": 0.125}, 1.0)
kill_client()
for version in (4, 5, 6):
    exporters.step(version, {"loss": 0.125}, 1.0)
exporters.close()
"""

WANDB_LOST_LATE = """
exporters = asyncio.run(start("offline"))
exporters.step(1, {"loss": 0.5}, 1.0)
kill_client()
exporters.close()
"""

WANDB_END = """
print("trained on")
sys.stdout.flush()
os._exit(0)  # the client's own farewell fails without its process
"""
WANDB_LOST = "Weights & Biases gets no more metrics until the learner starts"


def history(path: Path) -> list[dict[str, str]]:
    """The rows of a `.wandb` file: a log of blocks of 32 KiB, of records with a 7-byte header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, rows, part = path.read_bytes(), 7, [], b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 0x8000 - at % 0x8000 < 7:
            at += 0x8000 - at % 0x8000
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # a whole record, or the last part of one
            record = Record.FromString(part)
            part = b""
            if record.HasField("history"):
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): item.value_json
                        for item in record.history.item
                    }
                )
    return rows


def wandb_story(story: str, run_dir: Path) -> list[str]:
    """Lines that a process of its own prints, which plays a learner's part."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(run_dir),
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", WANDB_START + story + WANDB_END, str(run_dir)],
        capture_output=True, text=True, env=env, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_wandb_keeps_each_step_offline_and_never_stops_a_run(tmp_path):
    refused, dropped, last = wandb_story(WANDB_STORY, tmp_path)
    assert "monitor.wandb_project 'p' cannot be opened: No API key" in refused
    assert "set monitor.wandb_mode=offline" in refused
    assert dropped.startswith(WANDB_LOST)
    assert last == "trained on"
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*-abc*/run-abc.wandb"))
    rows = history(first)
    assert [(row["_step"], row["loss"], row["success/parity"]) for row in rows] == [
        ("1", "0.5", "0.25"),
        ("2", "0.25", "0.25"),
    ]
    assert second != first


@pytest.mark.slow
def test_wandb_lost_between_the_last_step_and_the_end_is_one_warning(tmp_path):
    dropped, last = wandb_story(WANDB_LOST_LATE, tmp_path)
    assert dropped.startswith(WANDB_LOST)
    assert last == "trained on"
