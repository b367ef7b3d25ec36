"""`headrace trajectories`: lists a run's samples, filters them, and prints what was said in one."""

import argparse
import asyncio
import json
import math
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from headrace.cli.runargs import USAGE, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.config import Config
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.report.samples import Filter, History, Row, Sample, Slot
    from headrace.report.transcript import Segment

HELP = f"""List a run's samples, newest last, or print transcripts.

With GROUP.INDEX after the run the transcripts of those samples are printed; with --show those of
all samples that the filters let through. Read from the archive and the run log, whether or not the
run goes on.

{USAGE}"""

_SLOT = re.compile(r"(\d{1,18})\.(\d{1,9})")
_SHOWN = 50
_PIPE_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    wanted = parser.add_argument_group("which samples")
    wanted.add_argument("--domain", help="of this domain")
    wanted.add_argument("--purpose", choices=("train", "probe"), help="trained on, or held out")
    outcome = wanted.add_mutually_exclusive_group()
    outcome.add_argument("--success", action="store_true", help="that succeeded")
    outcome.add_argument("--failed", action="store_true", help="that did not succeed")
    wanted.add_argument("--side", choices=("model", "environment"), help="charged to this side")
    wanted.add_argument("--kind", help="of this class of failure")
    wanted.add_argument("--version", type=int, help="sampled, at least partly, by this version")
    wanted.add_argument("--group", type=int, help="of this group")
    wanted.add_argument("--step", type=int, help="trained by this step")
    wanted.add_argument("--level", type=int, help="of this level")
    wanted.add_argument(
        "--min-score", type=_score, metavar="SCORE", help="with at least this score"
    )
    wanted.add_argument("--max-score", type=_score, metavar="SCORE", help="with at most this score")
    parser.add_argument(
        "--limit",
        type=_count,
        metavar="N",
        help=f"the newest N, 0 for all (default: {_SHOWN}, and all with --json)",
    )
    parser.add_argument("--show", action="store_true", help="transcripts instead of the table")
    parser.add_argument("--json", action="store_true", help="one JSON object per sample and line")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from headrace.report.samples import read_run

    first, *others = args.items
    slots = {(int(m[1]), int(m[2])) for item in others if (m := _SLOT.fullmatch(item))}
    config = resolve([first, *(item for item in others if not _SLOT.fullmatch(item))])
    wanted = _filter(args, config)
    history = asyncio.run(read_run(config))
    rows = [row for row in history.rows if wanted.matches(row)]
    if slots:
        rows = [row for row in rows if row.slot in slots]
        if missing := slots - {row.slot for row in rows}:
            raise ConfigError(_not_there(config, history, min(missing)))
    matching = len(rows)
    limit = args.limit if args.limit is not None else 0 if args.json or slots else _SHOWN
    rows = rows[-limit:] if limit else rows
    if args.show or slots:
        _print_transcripts(config, rows, as_json=args.json)
    elif args.json:
        for row in rows:
            print(json.dumps(_fields(row)))
    elif rows:
        _print_table(rows)
    if not rows or (len(rows) < matching and not args.json):
        print(_remark(config, history, len(rows), matching), file=sys.stderr)
    return 0


def _filter(args: argparse.Namespace, config: Config) -> "Filter":
    from headrace.report.samples import Filter

    domains = [domain.id for domain in config.domains]
    if args.domain is not None and args.domain not in domains:
        raise ConfigError(
            f"--domain {args.domain!r}: the run {config.run_name} has {', '.join(domains)}"
        )
    return Filter(
        success=True if args.success else False if args.failed else None,
        **{
            name: getattr(args, name)
            for name in (
                "domain", "purpose", "side", "kind", "version", "group", "step", "level",
                "min_score", "max_score",
            )
        },
    )  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 or more, as a whole number")
    return int(text)


def _score(text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):  # every comparison with nan is false: it would filter nothing
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number")
    return score


def _not_there(config: Config, history: "History", slot: "Slot") -> str:
    group, index = slot
    what = f"run {config.run_name} has no such sample {group}.{index}: "
    issued = history.groups.get(group)
    if issued is None:
        last = max(history.groups, default=None)
        return what + (f"its groups are 0 to {last}" if last is not None else "no group was issued")
    if index >= issued.size:
        return what + f"the indices of group {group} are 0 to {issued.size - 1}"
    if any(row.slot == slot for row in history.rows):
        return what + "the filters exclude it; leave them out"
    return what + "it is issued and not decided yet"


def _remark(config: Config, history: "History", shown: int, matching: int) -> str:
    from headrace.report.untrusted import word

    if shown:
        return f"the newest {shown} of {matching}; --limit 0 shows all"
    if not history.rows:
        return f"run {config.run_name} has no decided sample yet"
    kinds = sorted({row.kind for row in history.rows if row.kind})
    seen = f"; classes of failure: {', '.join(map(word, kinds))}" if kinds else ""
    return f"none of {len(history.rows)} samples of run {config.run_name} matches{seen}"


def _fields(row: "Row") -> dict[str, Any]:
    import msgspec

    return {"sample": row.name, **msgspec.structs.asdict(row)}


def _print_table(rows: "list[Row]") -> None:
    head = ("sample", "domain", "level", "purpose", "version", "score", "success", "failure",
            "turns", "tokens", "step")  # fmt: skip
    left = {"domain", "purpose", "success", "failure"}
    lines = [head, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        )
        print("  ".join(padded).rstrip())


def _cells(row: "Row") -> tuple[str, ...]:
    from headrace.report.untrusted import word

    return (
        row.name,
        word(row.domain),
        str(row.level),
        row.purpose,
        _version(row),
        "-" if row.score is None else f"{row.score:.2f}",
        "yes" if row.success else "no",
        f"{word(row.side)}: {word(row.kind)}" if row.side else "-",
        str(row.turns),
        str(row.tokens),
        row.fate_cell,
    )


def _version(row: "Row") -> str:
    return "-".join(str(version) for version in dict.fromkeys(row.versions)) or "-"


def _print_transcripts(config: Config, rows: "list[Row]", *, as_json: bool) -> None:
    """Read the run again and print what is wanted as it comes: none of it is held."""
    from headrace.broker.records import Trajectory
    from headrace.report.plain import render
    from headrace.report.samples import read_run
    from headrace.report.transcript import Decoder, segments

    # what became of a sample is known to these rows, and to a reading at its end alone
    wanted = {row.slot: row for row in rows}

    decode = Decoder(config)
    if decode.note:
        print(decode.note, file=sys.stderr)

    def show(read: "Row", sample: "Sample") -> None:
        row = wanted.get(read.slot)
        if row is None:
            return
        pieces = segments(sample, decode) if isinstance(sample, Trajectory) else []
        if as_json:
            print(json.dumps({**_fields(row), **_details(sample, pieces)}))
        else:
            print("\n".join(render(row, sample, pieces, _width())), end="\n\n")

    asyncio.run(read_run(config, show))


def _details(sample: "Sample", pieces: "list[Segment]") -> dict[str, Any]:
    from msgspec.structs import asdict

    from headrace.broker.records import Failed

    known = {"attempt": sample.attempt, "actor": sample.actor, "lineage": sample.lineage}
    if isinstance(sample, Failed):
        return {**known, "evidence": sample.evidence}
    verdict = sample.verdict
    return {
        **known,
        "temperature": sample.temperature,
        "queue_s": sample.queue_s,
        "wall_s": sample.wall_s,
        "segments": [asdict(piece) for piece in pieces],
        "turn_list": [asdict(turn) for turn in sample.turns],
        "executions": [asdict(execution) for execution in sample.executions],
        "checks": [asdict(check) for check in verdict.checks],
        "step_scores": verdict.step_scores,
        "evidence": verdict.evidence,
    }


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):  # not a terminal, or captured by a test
        return _PIPE_WIDTH
