"""Entry point of the `headrace` command: finds the command's file, runs it, words its errors.

Each command is one module with `HELP` (what it does, for its `--help`), `add_arguments(parser)` and
`run(args) -> int` (the exit code). Only the module of the command that was asked for is imported.
"""

import argparse
import difflib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from headrace.errors import ConfigError, HeadraceError

COMMANDS = {
    "train": ("headrace.cli.train", "run broker, learner and actors on this machine"),
    "broker": ("headrace.cli.broker", "serve the message broker"),
    "learner": ("headrace.cli.learner", "issue tasks, train on what comes back, publish weights"),
    "actor": ("headrace.cli.actor", "sample trajectories for a run"),
    "eval": ("headrace.cli.eval", "judge a model on tasks, with pass@k"),
    "status": ("headrace.cli.status", "show a run's processes, queues and rates"),
    "ledger": ("headrace.cli.ledger", "print what each optimizer step trained"),
    "trajectories": ("headrace.cli.trajectories", "list a run's samples, or print transcripts"),
    "report": ("headrace.cli.report", "write one HTML page about a run"),
    "skip": ("headrace.cli.skip", "pass over the batch of a coming step"),
    "replay": ("headrace.cli.replay", "form the batches again from the archived log"),
    "config": ("headrace.cli.config", "show a resolved configuration, or every key"),
    "model": ("headrace.cli.model", "make or download a base model"),
    "domain": ("headrace.cli.domain", "start a domain, list those there are, try one"),
    "doctor": ("headrace.cli.doctor", "check this machine, and what a run needs of it"),
    "sandbox": ("headrace.cli.sandbox", "prove what the sandbox isolates on this machine"),
    "bench": ("headrace.cli.bench", "run a benchmark of the repository"),
}
"""Name of each command -> its module and one line for the overview."""

PURPOSE = "Reinforcement-learning post-training of language models on tasks executed for real."
INTERRUPTED = 130
BROKEN_PIPE = 141
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
"""What a file system says of a name that a user gave."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; those of this process where not given.

    Returns:
        The exit code: the command's own, `exit_code` of a `HeadraceError` (whose message is printed
        on one line), or 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # what the terminal's encoding lacks is written out, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except HeadraceError as error:
        return report(error)
    except BaseExceptionGroup as group:
        deliberate, other = group.split((HeadraceError, KeyboardInterrupt))
        if deliberate is None or other is not None:
            raise
        return _report_group(deliberate)
    except BrokenPipeError:
        # whoever read our output has gone; keep the interpreter's last flush from saying so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno in _REFUSED and error.filename:
            return report(HeadraceError(f"{error.filename}: {error.strerror}"))
        if error.errno not in _FULL:
            raise
        return report(
            HeadraceError(
                f"{error.filename or 'run folder'}: {error.strerror}; nothing recorded is lost: "
                "free some space and start the same command again"
            )
        )


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_overview())
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"headrace {version('headrace')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown command {name!r}{hint}; `headrace --help` lists them")
    command = importlib.import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(
        prog=f"headrace {name}",
        description=command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    code: int = command.run(_parse(parser, rest))
    return code


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse with options allowed between positional arguments, where argparse can do that."""
    sequential = {argparse.PARSER, argparse.REMAINDER}
    if any(action.nargs in sequential for action in parser._actions):
        return parser.parse_args(arguments)
    return parser.parse_intermixed_args(arguments)


def _overview() -> str:
    lines = ["usage: headrace COMMAND ...", "", PURPOSE, "", "commands:"]
    lines += [f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "`headrace COMMAND --help` explains one; --version prints the version."]
    return "\n".join(lines)


def report(error: BaseException) -> int:
    """Print an error as one line on stderr; returns the exit code."""
    from headrace.report.untrusted import word

    # it may quote what a server or a record said
    print(f"headrace: error: {word(' '.join(str(error).split()))}", file=sys.stderr)
    return error.exit_code if isinstance(error, HeadraceError) else 1


def _report_group(group: BaseExceptionGroup[BaseException]) -> int:
    """Report the first of several simultaneous errors; the others follow from it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else report(error)


if __name__ == "__main__":
    sys.exit(main())
