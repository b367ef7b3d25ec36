"""`headrace doctor`: whether this machine can do what headrace, or one run, needs of it."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.cli import runargs
from headrace.config import Config
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.doctor.findings import Finding
    from headrace.doctor.runner import Check

HELP = """\
Check this machine: software, sandbox (every limit is attacked, once per boot), broker (one is
really started), devices, memory, disk. With --run also what that run names. Lines come as the
checks end; exit code 1 says that something failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument(
        "--run",
        nargs="+",
        metavar="RUN",
        default=[],
        help="RUN.toml files, or a run folder, and section.key=value, as for `headrace train`",
    )
    parser.add_argument("stray", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Check everything; exit code 1 where something failed.

    Raises:
        ConfigError: a run is named without --run.
    """
    if args.stray:
        named = shlex.join(args.stray)
        raise ConfigError(f"doctor takes a run behind --run: `headrace doctor --run {named}`")
    from headrace.doctor.runner import CHECKS
    from headrace.process import run_until_stopped

    found: list[Finding] = []

    async def work() -> None:
        found.extend(await check_all(args.run, CHECKS, quiet=args.json))

    run_until_stopped(work())  # and no check's process stays behind, whatever ends this one
    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    return 1 if any(finding.state == "failed" for finding in found) else 0


async def check_all(
    items: Sequence[str], checks: "Sequence[Check]", *, quiet: bool
) -> "list[Finding]":
    """Resolve the run, run the checks, and print lines as they come.

    Args:
        items: what names the run; empty for none. One that is wrong fails a line of its own, and
            the checks go on without it.
        checks: which ones.
        quiet: print nothing.
    """
    from headrace.doctor.findings import failed, ok
    from headrace.doctor.runner import run_checks

    found: list[Finding] = []

    def note(finding: "Finding") -> None:
        found.append(finding)
        if not quiet:
            print(line(finding, colour=sys.stdout.isatty()), flush=True)

    config: Config | None = None
    if items:
        try:
            config = runargs.resolve(list(items))
            note(ok("run", f"{' '.join(items)}: understood, run {config.run_name}"))
        except ConfigError as error:
            note(failed("run", str(error), "`headrace config keys` explains every key"))
    async for finding in run_checks(config, checks):
        note(finding)
    if not quiet:
        counts = {state: sum(f.state == state for f in found) for state in COLOURS}
        print(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    return found


COLOURS = {"ok": "32", "warning": "33", "failed": "31", "not needed": "2"}
"""States, and how a terminal shows them."""


def line(finding: "Finding", *, colour: bool) -> str:
    """A finding as a row of the table, its remedy below."""
    from headrace.report.untrusted import word

    state = f"{finding.state:<10}"
    if colour:
        state = f"\033[{COLOURS[finding.state]}m{state}\033[0m"
    # it may quote what a library said of its troubles, colours included
    text = f"{finding.check:<14} {state}  {word(finding.found)}"
    return f"{text}\n{'':<14} {'':<10}  -> {word(finding.remedy)}" if finding.remedy else text
