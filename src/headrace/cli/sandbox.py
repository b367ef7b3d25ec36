"""`headrace sandbox`: run one command in a jail, or prove what jails hold on this host."""

import argparse
import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.sandbox.spec import Result

HELP = """\
`headrace sandbox run [options] -- ARGV` runs a command in a jail and prints its result as JSON.
`headrace sandbox check` proves every limit on this host by attacking it, once per boot.
`headrace sandbox serve` runs jobs that come through the broker, until it is interrupted."""
_LIMITS = {
    "time": ("wall_s", 1),
    "memory": ("memory", 1 << 20),
    "output": ("output", 1 << 10),
    "processes": ("processes", 1),
}
_SPEC = {
    "files": ("files", 1),
    "disk": ("disk", 1 << 20),
    "clock": ("clock", 1),
    "seed": ("seed", 1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    commands = parser.add_subparsers(dest="sandbox_command", required=True, metavar="COMMAND")
    run_parser = commands.add_parser(
        "run",
        help="run a command in a jail and print its result as JSON",
        description="Run ARGV in a fresh jail with an empty workspace as its working folder, and "
        "print the result as one JSON object. The exit code is 0 unless the sandbox failed.",
    )
    add = run_parser.add_argument
    add("--toolchain", default="system", help="toolchain by name (default: %(default)s)")
    add("--toolchains", type=Path, metavar="FILE", help="TOML file with further toolchains")
    add("--time", type=float, metavar="S", help="seconds of wall time")
    add("--memory", type=float, metavar="MB", help="memory of all processes, MiB")
    add("--processes", type=int, metavar="N", help="processes and threads at the same time")
    add("--files", type=int, metavar="N", help="files and folders in the workspace")
    add("--disk", type=float, metavar="MB", help="size of the workspace, MiB")
    add("--output", type=float, metavar="KB", help="standard output, and error output, KiB")
    add(
        "--tree",
        type=Path,
        metavar="DIR",
        help="folder whose files are copied into the workspace",
    )
    add("--clock", type=int, metavar="S", help="Unix seconds at which the time of day stands")
    add("--seed", type=int, metavar="N", help="hash seed, and SEED (default: 0)")
    add("--input", type=Path, metavar="FILE", help="file given as standard input (default: none)")
    add("argv", nargs=argparse.REMAINDER, metavar="-- ARGV", help="the command")
    check_parser = commands.add_parser("check", help="prove every limit on this host")
    check_parser.add_argument("--again", action="store_true", help="even if done since the boot")
    serve_parser = commands.add_parser("serve", help="run jobs that come through the broker")
    serve_parser.add_argument("--broker", default="nats://127.0.0.1:4222", metavar="URL")
    serve_parser.add_argument(
        "--concurrent", type=int, default=8, metavar="N", help="jobs taken at the same time"
    )
    serve_parser.add_argument(
        "--ack-wait", type=float, default=30.0, metavar="S", help="silence that loses a job"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigError: an argument is wrong.
        SandboxError: the sandbox cannot do what is asked, or this host cannot run jails.
    """
    if args.sandbox_command == "check":
        return _check(again=args.again)
    if args.sandbox_command == "serve":
        return asyncio.run(_serve(args))
    result = asyncio.run(_run(args))
    print(result.json().decode())
    return 1 if result.status == "sandbox_error" else 0


def _check(*, again: bool) -> int:
    from headrace.sandbox.preflight import prove

    outcome = prove(fresh=again)
    print(f"isolation: {outcome.isolation}")
    if outcome.warning:
        print(f"WARNING: {outcome.warning}")
    for proof in outcome.proofs:
        print(f"{'holds' if proof.held else 'FAILS':<7}{proof.name:<34}{proof.detail}")
    return 1 if outcome.failed else 0


async def _serve(args: argparse.Namespace) -> int:
    from headrace.broker.connection import connected
    from headrace.sandbox.client import shared
    from headrace.sandbox.jobs import JobQueue
    from headrace.sandbox.preflight import proven

    if args.concurrent < 1:
        raise ConfigError(f"--concurrent must be at least 1, got {args.concurrent}")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with connected(args.broker, name="sandbox host", deadline_s=60.0) as connection:
        queue = JobQueue(connection, ack_wait_s=args.ack_wait)
        await queue.create()
        await proven()
        print(f"serving jobs of {args.broker} in {shared().isolation}", flush=True)
        await queue.serve(stop, concurrent=args.concurrent)
    return 0


async def _run(args: argparse.Namespace) -> "Result":
    import msgspec

    from headrace.sandbox.box import Sandbox
    from headrace.sandbox.spec import Limits, SandboxSpec

    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise ConfigError("no command: headrace sandbox run [options] -- ARGV")
    if args.tree is not None and not args.tree.is_dir():
        raise ConfigError(f"--tree {args.tree}: no such folder")
    if args.input is not None and not args.input.is_file():
        raise ConfigError(f"--input {args.input}: no such file")
    tables = {
        "toolchain": args.toolchain,
        "toolchain_files": [] if args.toolchains is None else [str(args.toolchains)],
        **_scaled(args, _SPEC),
    }
    try:
        sandbox = Sandbox(msgspec.convert(tables, SandboxSpec))
        given = msgspec.to_builtins(sandbox.limits) | _scaled(args, _LIMITS)
        limits = msgspec.convert(given, Limits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"headrace sandbox run: {error}") from error
    async with sandbox as box:
        if args.tree is not None:
            await box.copy_in(args.tree)
        stdin = b"" if args.input is None else args.input.read_bytes()
        return await box.run(argv, stdin=stdin, limits=limits)


def _scaled(
    args: argparse.Namespace, options: dict[str, tuple[str, int]]
) -> dict[str, float | int]:
    """Given options as fields in base units; what is not given keeps its default."""
    fields: dict[str, float | int] = {}
    for option, (field, scale) in options.items():
        value = getattr(args, option)
        if value is not None:
            fields[field] = value if scale == 1 else int(value * scale)
    return fields
