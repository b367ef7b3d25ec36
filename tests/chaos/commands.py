"""Runs the public commands as separate processes, and watches a run from outside."""

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


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
            process.wait(30)

    def start(self, role: str) -> "subprocess.Popen[bytes]":
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        output = self.run_dir.parent / f"{role}.out"
        with output.open("ab") as sink:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace.cli.main", role, *self.items],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=ROOT,
            )
        self.alive.append(process)
        return process

    def start_in_random_order(self, roles: list[str]) -> "dict[str, subprocess.Popen[bytes]]":
        random.shuffle(roles)
        return {role: self.start(role) for role in roles}

    def output(self, role: str) -> str:
        return (self.run_dir.parent / f"{role}.out").read_text(errors="replace")

    def call(self, *arguments: str, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-P", "-m", "headrace.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
        )

    def ledger(self) -> list[dict[str, Any]]:
        result = self.call("ledger", str(self.run_dir), "--json")
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    def steps(self) -> int:
        """Steps in the ledger, as the run folder shows them."""
        try:
            return int(json.loads((self.run_dir / "progress.json").read_bytes())["steps"])
        except FileNotFoundError:
            return -1

    def until(
        self, reached: Callable[[], bool], process: "subprocess.Popen[bytes]", *, deadline_s: float
    ) -> None:
        """Wait while `process` lives until the condition holds."""
        deadline = time.monotonic() + deadline_s
        while not reached():
            assert time.monotonic() < deadline, f"not reached within {deadline_s} s"
            try:
                code = process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            assert reached(), f"{process.args!r} ended with {code}"
            return


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
