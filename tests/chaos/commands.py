"""Runs the public commands as separate processes, and watches a run from outside."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import Config, load

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = [sys.executable, "-P", "-m", "headrace.cli.main"]
WAIT_S = 900
"""Bounds every wait for a process: none is a rule, and a busy machine takes many times as long."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Commands:
    """The processes of one run; whatever still lives is killed at the end of the block."""

    def __init__(self, run_dir: Path, *settings: str, example: str = "tiny.toml") -> None:
        self.run_dir = run_dir
        self.url = f"nats://127.0.0.1:{free_port()}"
        self.items = [
            str(ROOT / "examples" / example),
            f"run.dir={run_dir}",
            f"broker.url={self.url}",
            f"model.path={run_dir.parent / 'tiny-llama'}",
            *settings,
        ]
        self.alive: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.alive:
            process.kill()
        for process in self.alive:
            process.wait(WAIT_S)

    def start(self, role: str) -> "subprocess.Popen[bytes]":
        return self.spawn(role, [*HEADRACE, role, *self.items])

    def spawn(self, name: str, argv: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start any program, with its output in `<name>.out` beside the run folder."""
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        with (self.run_dir.parent / f"{name}.out").open("ab") as sink:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd=ROOT
            )
        self.alive.append(process)
        return process

    def start_in_order(self, roles: Sequence[str]) -> "dict[str, subprocess.Popen[bytes]]":
        return {role: self.start(role) for role in roles}

    def output(self, role: str) -> str:
        return (self.run_dir.parent / f"{role}.out").read_text(errors="replace")

    def call(self, *arguments: str, timeout: float = WAIT_S) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*HEADRACE, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
        )

    def config(self) -> Config:
        return load([Path(self.items[0])], self.items[1:])

    def ledger(self) -> list[dict[str, Any]]:
        result = self.call("ledger", str(self.run_dir), "--json")
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    def status(self) -> dict[str, Any]:
        result = self.call("status", str(self.run_dir), "--json")
        assert result.returncode == 0, result.stderr
        status: dict[str, Any] = json.loads(result.stdout)
        return status

    def held_by(self, actor: "subprocess.Popen[bytes]") -> list[int]:
        """Groups whose tasks an actor holds, as its lease says."""
        return next(
            (item["held"] for item in self.status()["processes"] if item["pid"] == actor.pid), []
        )

    def steps(self) -> int:
        """Steps in the ledger, as the run folder shows them."""
        try:
            return int(json.loads((self.run_dir / "progress.json").read_bytes())["steps"])
        except FileNotFoundError:
            return -1

    def until(self, reached: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
        """Wait while `process` lives until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < deadline, f"not reached within {WAIT_S} s"
            try:
                code = process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            assert reached(), f"{process.args!r} ended with {code}"
            return


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)


def seeded() -> random.Random:
    """Chance from a printed seed, so that a run that failed can be had again."""
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")  # noqa: T201  # pytest shows it where the test fails
    return random.Random(seed)


def shuffled(names: Sequence[str], chance: random.Random) -> list[str]:
    """The names in a random order, which is printed."""
    order = chance.sample(names, len(names))
    print("order:", *order)  # noqa: T201
    return order


@dataclass(frozen=True)
class Process:
    """A process of this machine; the start time tells it from a later one of the same id."""

    pid: int
    started: int


def processes() -> dict[Process, tuple[int, str]]:
    """Every process that runs, with its parent's id and its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # the name, second field, may hold spaces and brackets
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if fields[0] != "Z":
                process = Process(int(folder.name), int(fields[19]))
                found[process] = (int(fields[1]), command)
    return found


def family(pid: int) -> set[Process]:
    """A process and everything that descends from it."""
    everything = processes()
    members = {process for process in everything if process.pid == pid}
    while True:
        ids = {process.pid for process in members}
        more = {process for process, (parent, _) in everything.items() if parent in ids} - members
        if not more:
            return members
        members |= more
