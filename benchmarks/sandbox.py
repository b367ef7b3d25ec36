"""What jails cost: latency and throughput against bare nsjail and bubblewrap, snapshots, a soak.

Kinds of a run are interleaved, so that other work on the machine disturbs all of them alike; the
load is stored with each row. Rows go to standard output and to benchmarks/results/sandbox.jsonl.

    python -P benchmarks/sandbox.py [--runs 100] [--soak-minutes 10] [--only latency ...]
"""

import argparse
import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from headrace.benchrows import store
from headrace.sandbox import jail, toolchains
from headrace.sandbox.box import Sandbox, host_admission
from headrace.sandbox.client import shared
from headrace.sandbox.mounts import BOXES
from headrace.sandbox.spec import Limits, SandboxSpec

SPEC = SandboxSpec(toolchain="bash")
COMMANDS = {"true": ["/usr/bin/true"], "python": ["/usr/bin/python3", "-S", "-c", "pass"]}
TESTS = 40
BATCH = """
import json, os, sys
passed = 0
for test in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        try:
            exec(test)
        except BaseException:
            os._exit(1)
        os._exit(0)
    passed += os.waitpid(child, 0)[1] == 0
print(passed)
"""
SOAK = (
    ("ok", "print(1)", Limits()),
    ("processes", "import os\nwhile True: os.fork()", Limits(processes=8)),
    ("memory", "x = []\nwhile True: x.append(bytearray(1 << 20))", Limits(memory=32 << 20)),
    ("output_limit", "import os\nwhile True: os.write(1, b'x' * 65536)", Limits(output=65536)),
    ("timeout", "import os, time\nos.fork(); os.setsid(); time.sleep(60)", Limits(wall_s=0.2)),
    ("disk", "f = open('x', 'wb', 0)\nwhile True: f.write(b'x' * 65536)", Limits()),
)
Row = dict[str, object]


def quantiles(seconds: list[float]) -> Row:
    """Median and 95th percentile, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(ordered[len(ordered) // 2] * 1e3, 2),
        "p95_ms": round(ordered[int(len(ordered) * 0.95)] * 1e3, 2),
    }


@contextmanager
def bare_nsjail() -> Iterator[Callable[[list[str]], list[str]]]:
    """Argument vectors of nsjail with a session's namespaces, mounts, rlimits and policy.

    What is left out is what the sandbox adds: control groups, the jail's own init, outputs.
    """
    plan = jail.Plan.of(SPEC, toolchains.load())
    trees = {source: source for source in plan.sources()}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("work", "tmp", "shm"):
            (Path(folder) / name).mkdir()
            (Path(folder) / name).chmod(0o777)

        def argv(command: list[str]) -> list[str]:
            built = jail.arguments(
                plan,
                command,
                trees=trees,
                box="BOX",
                env={},
                limits=Limits(),
                uid=jail.JAIL_UID if os.geteuid() == 0 else os.geteuid(),
                cgroups=True,
                mode="score",
            )
            built = [part.replace(f"{BOXES}/BOX", folder) for part in built]
            at = built.index("--log_fd")
            del built[at : at + 2]
            at = built.index("--pass_fd")
            del built[at : at + 2]
            return [built[0], "--really_quiet", *built[1:]]

        yield argv
    for left in Path("/tmp").glob("nsjail.*"):
        left.rmdir()


def bubblewrap(command: list[str]) -> list[str]:
    """The nearest that bubblewrap has: namespaces and mounts; no limits, no policy."""
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--new-session"),
        *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib"),
        *("--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin"),
        *("--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/box", "--chdir", "/box"),
        *("--setenv", "PATH", "/usr/bin", "--", *command),
    ]


async def process(argv: list[str]) -> None:
    """Run a command of the host to its end.

    Raises:
        RuntimeError: it failed.
    """
    child = await asyncio.create_subprocess_exec(
        *argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _, complaint = await child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"{argv[0]} failed: {complaint.decode()[-500:]}")


async def session(box: Sandbox, command: list[str]) -> None:
    """Run a command in a session.

    Raises:
        RuntimeError: it did not end with 0.
    """
    result = await box.run(command)
    if result.status != "ok":
        raise RuntimeError(f"{command} in a session: {result}")


def spent() -> float:
    """CPU seconds of this process, the keeper, and all of their children that have ended."""
    keeper = Path(f"/proc/{shared().pid}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, keeper[11:15]))
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


async def latency(runs: int) -> list[Row]:
    """One command after another, every kind in turn.

    `session` is a fresh jail on a session's workspace, `shell` a command of its persistent shell.
    `pairs_over_nsjail` is the median of each call's time over that of the bare nsjail beside it.
    CPU time is given where the kernel accounts it to a parent that waits.
    """
    rows: list[Row] = []
    async with Sandbox(SPEC) as box:
        shell = await box.shell()
        with bare_nsjail() as nsjail:
            for name, command in COMMANDS.items():
                kinds: dict[str, Callable[[], Awaitable[object]]] = {
                    "process": partial(process, command),
                    "nsjail": partial(process, nsjail(command)),
                    "session": partial(session, box, command),
                    "shell": partial(shell.run, shlex.join(command)),
                }
                if shutil.which("bwrap"):
                    kinds["bubblewrap"] = partial(process, bubblewrap(command))
                times: dict[str, list[float]] = {kind: [] for kind in kinds}
                cpu = dict.fromkeys(kinds, 0.0)
                for _ in range(runs):
                    for kind, call in kinds.items():
                        before, start = spent(), time.perf_counter()
                        await call()
                        times[kind].append(time.perf_counter() - start)
                        cpu[kind] += spent() - before
                for kind, seconds in times.items():
                    row: Row = {"question": "latency", "command": name, "kind": kind, "runs": runs}
                    row |= quantiles(seconds)
                    pairs = [a / b for a, b in zip(seconds, times["nsjail"], strict=True)]
                    row["pairs_over_nsjail"] = round(sorted(pairs)[runs // 2], 3)
                    if kind in {"process", "nsjail", "session"}:
                        row["cpu_ms"] = round(cpu[kind] / runs * 1e3, 1)
                    rows.append(row)
    return rows


async def throughput(runs: int) -> list[Row]:
    """Executions per second of `python3 -S -c pass` by number of concurrent callers."""
    rows: list[Row] = []
    command = COMMANDS["python"]

    async def measure(kind: str, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
        total = max(runs, len(calls))
        left = iter(range(total))

        async def caller(call: Callable[[], Awaitable[None]]) -> None:
            for _ in left:
                await call()

        start = time.perf_counter()
        await asyncio.gather(*map(caller, calls))
        rate = total / (time.perf_counter() - start)
        row: Row = {"question": "throughput", "kind": kind, "concurrent": len(calls)}
        rows.append(row | {"per_second": round(rate, 1)})

    with bare_nsjail() as nsjail:
        argv = nsjail(command)
        for concurrent in (1, 2, 8, 64):
            boxes = [Sandbox(SPEC) for _ in range(concurrent)]
            for box in boxes:
                await box.__aenter__()
            calls = [partial(session, box, command) for box in boxes]
            await measure("session", calls)
            for box in boxes:
                await box.close()
            await measure("nsjail per call", [partial(process, argv)] * concurrent)
            if shutil.which("bwrap"):
                wrapped = partial(process, bubblewrap(command))
                await measure("bubblewrap", [wrapped] * concurrent)
    return rows


async def batches(runs: int) -> list[Row]:
    """Unit tests: one jail for each, against one session command that forks for each."""
    tests = [f"assert sum(range({n})) == {n * (n - 1) // 2}" for n in range(TESTS)]
    apart, together = [], []
    async with Sandbox(SPEC) as box:
        for _ in range(max(1, runs // 20)):
            start = time.perf_counter()
            for test in tests:
                await session(box, ["python3", "-S", "-c", test])
            apart.append(time.perf_counter() - start)
            start = time.perf_counter()
            result = await box.run(["python3", "-S", "-c", BATCH], stdin=json.dumps(tests).encode())
            together.append(time.perf_counter() - start)
            if result.stdout != f"{TESTS}\n".encode():
                raise RuntimeError(f"the batch did not pass: {result}")
    median = [sorted(times)[len(times) // 2] for times in (apart, together)]
    row: Row = {"question": "batch", "tests": TESTS, "jail_per_test_ms": round(median[0] * 1e3, 1)}
    row |= {"one_session_ms": round(median[1] * 1e3, 1), "ratio": round(median[0] / median[1], 1)}
    return [row]


async def snapshots(runs: int) -> list[Row]:
    """Snapshot and restore by number of files of 2 KiB; `small` is after changing one file."""
    rows: list[Row] = []
    for files in (10, 100, 1000, 4000):
        async with Sandbox(SandboxSpec(files=files + 100)) as box:
            for n in range(files):
                await box.write(f"{n % 20}/{n}", os.urandom(1024) * 2)
            row: Row = {"question": "snapshot", "files": files}
            row["first_ms"], first = await timed(box.snapshot())
            await asyncio.sleep(0.05)
            await box.snapshot()
            await box.write("0/0", b"changed")
            row["small_ms"], _ = await timed(box.snapshot())
            row["restore_small_ms"], _ = await timed(box.restore(str(first)))
            for n in range(files):
                await box.write(f"{n % 20}/{n}", b"changed")
            row["restore_all_ms"], _ = await timed(box.restore(str(first)))
            rows.append(row)
    return rows


async def timed(call: Awaitable[object]) -> tuple[float, object]:
    """Milliseconds and value of a call."""
    start = time.perf_counter()
    value = await call
    return round((time.perf_counter() - start) * 1e3, 2), value


async def left_behind() -> Row:
    """Processes, mounts and groups of jails, descriptors here and in the keeper."""
    keeper = shared().pid
    await shared().ask("rest")  # what waits for the next jail
    children = Path(f"/proc/{keeper}/mountinfo").read_text().count(" /run/box/")
    groups = [
        name
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        if os.path.basename(folder).startswith(f"headrace-{keeper}-")
        for name in names
    ]
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return {
        "processes": sum(s.rpartition(")")[2].split()[1] == str(keeper) for s in stats),
        "mounts": children,
        "groups": len(groups),
        "files": len(list(Path("/tmp").glob("nsjail*"))),
        "descriptors": len(os.listdir("/proc/self/fd")) + len(os.listdir(f"/proc/{keeper}/fd")),
        "keeper_rss_kib": int(Path(f"/proc/{keeper}/statm").read_text().split()[1])
        * (os.sysconf("SC_PAGESIZE") // 1024),
    }


async def soak(minutes: float) -> list[Row]:
    """Hostile programs in sessions without pause; what is left at the end, and before."""
    ran = 0
    wrong: list[str] = []
    end = time.monotonic() + minutes * 60

    async def attacker(number: int) -> None:
        nonlocal ran
        while time.monotonic() < end:
            status, code, limits = SOAK[(ran + number) % len(SOAK)]
            async with Sandbox(SandboxSpec(disk=4 << 20)) as box:
                result = await box.run(["python3", "-S", "-c", code], limits=limits)
            ran += 1
            if result.status != status:
                wrong.append(f"{status}: {msgspec.structs.replace(result, stdout=b'')}")

    async with Sandbox(SandboxSpec()) as box:
        await box.run(["python3", "-S", "-c", "pass"])
    before = await left_behind()
    await asyncio.gather(*(attacker(number) for number in range(4)))
    row: Row = {"question": "soak", "minutes": minutes, "sessions": ran, "wrong": wrong}
    return [
        row | {"before": before, "after": await left_behind(), "queue": host_admission().waiting}
    ]


async def run(args: argparse.Namespace) -> None:
    """Run the chosen parts and store their rows."""
    parts: dict[str, Callable[[int], Awaitable[list[Row]]]] = {
        "latency": latency,
        "throughput": throughput,
        "batch": batches,
        "snapshot": snapshots,
    }
    for name in parts if args.only is None else args.only:
        print(f"sandbox: {name} ...", file=sys.stderr, flush=True)
        for row in await parts[name](args.runs):
            store(__file__, row)
    if args.soak_minutes:
        print(f"sandbox: soak, {args.soak_minutes:g} minutes ...", file=sys.stderr, flush=True)
        for row in await soak(args.soak_minutes):
            store(__file__, row)


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--soak-minutes", type=float, default=0.0)
    parser.add_argument(
        "--only", nargs="*", choices=("latency", "throughput", "batch", "snapshot"), default=None
    )
    args = parser.parse_args()
    asyncio.run(run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
