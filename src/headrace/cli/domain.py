"""`headrace domain`: start a domain, list the registered ones, prove that one judges well."""

import argparse
import asyncio
from pathlib import Path
from shlex import quote

from headrace.errors import ConfigError, TaskError

HELP = """\
`headrace domain new ID` writes a small package with a working domain of that name, to start from.
`headrace domain list` shows the registered domains.
`headrace domain show ID` prints tasks of one.
`headrace domain check ID` runs its oracle, an empty answer and hostile answers through the jail and
fails unless the oracle wins every task, and none of the others does: a lucky answer wins some."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("action", choices=("new", "list", "show", "check"))
    parser.add_argument("id", nargs="?", help="identifier of a domain; not for `list`")
    parser.add_argument("--folder", help="where `new` writes; ./ID by default, must not exist")
    parser.add_argument("--level", type=int, help="one level; all of them by default")
    parser.add_argument("--tasks", type=int, default=6, help="tasks of each level (default 6)")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code.

    Raises:
        ConfigError: no or an unknown domain or level, or too few tasks.
        TaskError: the domain does not judge as it should.
    """
    from headrace.environments.registry import get_domain

    if args.action == "list" and args.id:
        raise ConfigError(
            f"headrace domain list takes no identifier: `headrace domain show {args.id}` shows one"
        )
    if args.action != "list" and not args.id:
        raise ConfigError(f"headrace domain {args.action} needs the identifier of a domain")
    if args.action == "new":
        _new(args)
        return 0
    if args.action == "list":
        _list()
        return 0
    domain = get_domain(args.id)
    if args.level is not None and not 0 <= args.level < domain.levels:
        raise ConfigError(f"domain {args.id} has levels 0 to {domain.levels - 1}, not {args.level}")
    # with a single task a lucky answer cannot be told from a hole
    least = 2 if args.action == "check" else 1
    if args.tasks < least:
        raise ConfigError(f"--tasks must be at least {least}, got {args.tasks}")
    levels = list(range(domain.levels)) if args.level is None else [args.level]
    if args.action == "show":
        _show(args.id, levels, args.tasks)
    else:
        asyncio.run(_check(args.id, levels, args.tasks))
    return 0


def _list() -> None:
    from headrace.environments.registry import all_domains, missing_families

    domains = all_domains()
    width = max(len(domain.id) for domain in domains)
    for domain in domains:
        summary = (domain.__doc__ or "").strip().partition("\n")[0]
        count = f"{domain.levels} level{'s' if domain.levels > 1 else ''}"
        print(f"{domain.id:<{width}}  {count:<10} {summary}")
    for family, command in missing_families().items():
        print(f"not installed: {family}.* ({command})")


def _new(args: argparse.Namespace) -> None:
    from headrace.environments.scaffold import write_domain

    folder = Path(args.folder or args.id)
    for path in write_domain(args.id, folder):
        print(f"wrote {path}")
    print(
        "next:\n"
        f"  pip install --no-build-isolation -e {quote(str(folder))}\n"
        f"  headrace domain show {args.id}\n"
        f"  headrace domain check {args.id}\n"
        f"  headrace train {quote(str(folder / 'run.toml'))}"
    )


def _show(ident: str, levels: list[int], tasks: int) -> None:
    from headrace.environments.registry import get_domain

    domain = get_domain(ident)
    for level in levels:
        for index in range(tasks):
            task = domain.task(index, split="train", level=level)
            asked = task.messages[-1].content.replace("\n", "\\n")
            print(f"level {level}  {asked}  ->  {domain.oracle(task, [])!r}")


async def _check(ident: str, levels: list[int], tasks: int) -> None:
    from headrace.environments.check import check_domain
    from headrace.environments.registry import get_domain
    from headrace.report.untrusted import word
    from headrace.sandbox.preflight import proven

    domain = get_domain(ident)
    await proven()  # a fork bomb is about to run
    problems: list[str] = []
    for level in levels:
        report = await check_domain(domain, level=level, tasks=tasks)
        problems += [f"level {level}: {problem}" for problem in report.problems]
        print(
            f"level {level}  oracle {report.oracle}/{report.tasks}  "
            f"hostile answers {report.hostile}  problems {len(report.problems)}  "
            f"{report.wall_s:.1f} s"
        )
    for problem in problems:
        print(f"  {word(problem)}")  # it may quote what a jailed program wrote
    if problems:
        raise TaskError(f"domain {ident} has {len(problems)} problems; the first: {problems[0]}")
