"""`headrace status`: a run's processes, window, queues and rates."""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.runargs import USAGE, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.config import Config
from headrace.errors import BrokerError, DeadlineError

if TYPE_CHECKING:
    from headrace.monitor.progress import Progress

HELP = f"""Show a run: its processes and their leases, version, window, queue depths and rates.

{USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = resolve(args.items)
    try:
        status = asyncio.run(_status(config))
    except (BrokerError, DeadlineError) as error:
        status = _stopped(config, error)
    if args.json:
        print(json.dumps(status))
    else:
        _show(status)
    return 0


def _stopped(config: Config, error: BrokerError | DeadlineError) -> dict[str, Any]:
    """What the run folder says of a run whose broker does not answer.

    Raises:
        BrokerError, DeadlineError: the folder knows nothing either.
    """
    import msgspec

    from headrace.monitor.progress import read_progress

    progress = read_progress(Path(config.run.dir))
    if progress is None:
        raise error
    finished = progress.phase == "done"
    return {
        "run": config.run_name,
        "phase": "finished" if finished else "stopped",
        "version": progress.version,
        "lineage": -1,
        "processes": [],
        "window": _window(config, progress),
        "queues": {},
        "log": {"first": 0, "last": 0, "bytes": 0},
        "progress": msgspec.to_builtins(progress, str_keys=True),
    }


def _window(config: Config, progress: "Progress | None") -> dict[str, int | None]:
    issued, trained, filtered = (
        (progress.issued, progress.trained, progress.filtered) if progress else (0, 0, 0)
    )
    return {
        "limit": (config.staleness.max_versions + 1) * config.learner.batch_groups,
        "issued": issued,
        "trained": trained,
        "filtered": filtered,
        "outstanding": issued - trained - filtered if progress else None,
    }


async def _status(config: Config) -> dict[str, Any]:
    import msgspec

    from headrace.broker import leases
    from headrace.broker.connection import Retry, connected
    from headrace.broker.runlog import RunLog
    from headrace.broker.state import RunState
    from headrace.broker.subjects import RunNames
    from headrace.broker.taskqueue import TaskQueue
    from headrace.monitor.progress import read_progress

    names = RunNames(config.run_name)
    async with connected(config.broker.url, name="status", deadline_s=2) as connection:
        log = await RunLog.attach(connection, names)
        info = await log.info()
        current = await RunState(connection, names).current()
        alive: list[leases.Lease] = []
        async for attempt in Retry(connection, "reading the leases"):
            with attempt:
                alive = await leases.alive(connection, names)
        pools = sorted({domain.pool for domain in config.domains} or {"default"})
        depths = await TaskQueue(connection, names).depths(pools)
    progress = read_progress(Path(config.run.dir))
    now = time.time()
    return {
        "run": names.run,
        "phase": current.phase if current else "starting",
        "version": current.version if current else -1,
        "lineage": current.lineage if current else -1,
        "processes": [
            {
                "role": lease.role,
                "id": lease.id,
                "pid": lease.pid,
                "host": lease.host,
                "status": lease.status,
                "detail": lease.detail,
                "version": lease.version,
                "lineage": lease.lineage,
                "pools": lease.pools,
                "held": lease.held,
                "alive_s": round(now - lease.started, 1),
                "counters": lease.counters,
            }
            for lease in alive
        ],
        "window": _window(config, progress),
        "queues": {pool: {"waiting": w, "held": h} for pool, (w, h) in depths.items()},
        "log": {"first": info.first_seq, "last": info.last_seq, "bytes": info.bytes},
        "progress": msgspec.to_builtins(progress, str_keys=True) if progress else None,
    }


def _show(status: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from headrace.report.untrusted import word

    # what processes say of themselves is text, whatever it holds
    console = Console(markup=False, emoji=False)
    console.print(
        f"run {status['run']}: {status['phase']}, version {status['version']}, "
        f"lineage {status['lineage']}"
    )
    table = Table("role", "id", "pid", "status", "version", "held groups", "alive")
    for process in status["processes"]:
        text = process["status"] + (f": {process['detail']}" if process["detail"] else "")
        table.add_row(
            word(process["role"]),
            word(process["id"]),
            str(process["pid"]),
            word(text),
            str(process["version"]),
            str(len(process["held"])),
            f"{process['alive_s']:.0f} s",
        )
    console.print(table)
    window, log = status["window"], status["log"]
    if window["outstanding"] is not None:
        console.print(
            f"groups: {window['issued']} issued, {window['trained']} trained, "
            f"{window['filtered']} filtered; {window['outstanding']} of at most "
            f"{window['limit']} outstanding"
        )
    for pool, depth in status["queues"].items():
        console.print(f"pool {pool}: {depth['waiting']} tasks waiting, {depth['held']} held")
    console.print(f"log: records {log['first']} to {log['last']}, {log['bytes'] / 1e6:.1f} MB")
    if status["progress"]:
        progress = status["progress"]
        console.print(
            f"rates: {progress['generated_tokens_per_s']:.0f} generated and "
            f"{progress['trained_tokens_per_s']:.0f} trained tokens/s"
        )
