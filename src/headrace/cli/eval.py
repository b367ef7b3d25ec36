"""`headrace eval`: what a model can do, with pass@k, as an actor of a run would sample it."""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli import runargs
from headrace.cli.main import report as report_error
from headrace.config import Config
from headrace.errors import ConfigError, HeadraceError
from headrace.runfolder import existing_checkpoints

if TYPE_CHECKING:
    from headrace.actor.evaluate import Exam

_LEVEL = re.compile(r"[0-9]{1,6}")

HELP = f"""\
Sample tasks with a model, judge them in the jail, and print pass@k with 95 % intervals.

CHECKPOINT is a Hugging Face folder (a checkpoint of a run, or any other), a run folder (its newest
checkpoint), or the name of a model on the hub. Sampling, lengths, threads and domains are those of
the run that CHECKPOINT belongs to, or of the RUN that is given after it.

{runargs.USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="model folder, run folder, or org/name")
    add(
        "items",
        nargs="*",
        default=[],  # else argparse would call it required
        metavar="RUN",
        help="RUN.toml, a run folder, or section.key=value",
    )
    add(
        "--domain",
        action="append",
        default=[],
        metavar="ID[:LEVEL]",
        help="domain to ask, again for more (default: those of the run)",
    )
    add("--tasks", type=int, default=50, metavar="N", help="tasks per domain (default 50)")
    add("--samples", type=int, default=1, metavar="K", help="samples per task (default 1)")
    add(
        "--pass-at",
        action="append",
        type=int,
        default=[],
        metavar="K",
        help="k of pass@k, again for more (default: 1 and the number of samples)",
    )
    add("--temperature", metavar="T", help="the same as sampling.temperature=T")
    add("--split", choices=("heldout", "train"), default="heldout", help="default: heldout")
    add("--seed", type=int, default=0, help="of the samples (default 0)")
    add("--output", type=Path, metavar="FILE", help="write every sample as a line of JSON")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate; exit code 1 where a domain has no sample that could be judged.

    Raises:
        ConfigError: the checkpoint, a domain, the run or an option is wrong.
    """
    ks = _ks(args)
    folder, run_folder = _find(args.checkpoint)
    config = _config(args, folder, run_folder)
    exams = _exams(args, config)
    from headrace.cli.evaluation import evaluate_and_print  # seconds: torch
    from headrace.monitor.logs import setup_logging
    from headrace.process import leave, run_until_stopped

    setup_logging("eval", "", None)
    # vLLM's, about names of torch's, on every start
    warnings.simplefilter("ignore", FutureWarning)
    codes: list[int] = []

    async def work() -> None:
        codes.append(await evaluate_and_print(args, folder, config, exams, ks))

    try:
        run_until_stopped(work())
        leave(codes[0])
    except HeadraceError as error:
        leave(report_error(error))


def _ks(args: argparse.Namespace) -> list[int]:
    for name in ("tasks", "samples"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    ks = sorted(set(args.pass_at or [1, args.samples]))
    if ks[0] < 1:
        raise ConfigError(f"--pass-at must be at least 1, got {ks[0]}")
    if ks[-1] > args.samples:
        raise ConfigError(
            f"--pass-at {ks[-1]} needs at least as many samples of each task: "
            f"add --samples {ks[-1]} (now {args.samples})"
        )
    return ks


def _find(text: str) -> tuple[Path, Path | None]:
    """The model's folder, and that of the run it belongs to."""
    from headrace import hub

    path = Path(text)
    if not os.path.exists(path) and hub.is_name(text):
        return hub.fetch(text), None
    if not os.path.isdir(path):
        raise ConfigError(
            f"{text}: no such folder; give a Hugging Face model folder, a run folder, or the name "
            "of a model on the hub (org/name)"
        )
    if os.path.isdir(path / "checkpoints"):
        saved = existing_checkpoints(path)
        if not saved:
            raise ConfigError(f"{text}: this run has no checkpoint yet; give a model folder")
        return saved[-1], path
    if not os.path.isfile(path / "config.json"):
        raise ConfigError(f"{text}: not a model (it has no config.json): give a model folder")
    owner = path.resolve().parent.parent
    named = path.resolve().parent.name == "checkpoints" and (owner / runargs.CONFIG_FILE).is_file()
    return path, owner if named else None


def _config(args: argparse.Namespace, folder: Path, run_folder: Path | None) -> Config:
    from headrace.config import load

    settings = list(args.items)
    if args.temperature is not None:
        settings.append(f"sampling.temperature={args.temperature}")
    if runargs.names_configuration(settings):
        return runargs.resolve(settings)
    if run_folder is not None:
        return runargs.resolve([str(run_folder), *settings])
    return load([], [f"model.dtype={_own_dtype(folder)}", *settings])


def _own_dtype(folder: Path) -> str:
    """Dtype that a model's configuration declares."""
    import msgspec

    try:
        declared = msgspec.json.decode(
            (folder / "config.json").read_bytes(), type=dict[str, object]
        )
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{folder}: its config.json is not JSON: {error}") from error
    dtype = str(declared.get("dtype") or declared.get("torch_dtype"))
    return dtype if dtype in {"bfloat16", "float16", "float32"} else "bfloat16"


def _exams(args: argparse.Namespace, config: Config) -> "list[Exam]":
    from headrace.environments.registry import get_domain

    levels = {mix.id: mix.level for mix in config.domains}
    asked: dict[tuple[str, int], None] = {}
    for text in args.domain or levels:
        ident, colon, level = text.partition(":")
        if colon and not _LEVEL.fullmatch(level):
            raise ConfigError(f"--domain {text}: the level must be a number")
        asked[ident, int(level) if colon else levels.get(ident, 0)] = None
    if not asked:
        raise ConfigError(
            f"{args.checkpoint} belongs to no run: name its domains with --domain ID[:LEVEL] "
            "(`headrace domain list` shows them), or give a RUN.toml after it"
        )
    for ident, level in asked:
        levels_of = get_domain(ident).levels
        if level >= levels_of:
            raise ConfigError(f"domain {ident} has levels 0 to {levels_of - 1}, not {level}")
    from headrace.actor.evaluate import Exam  # seconds: torch
    from headrace.environments.generate import distinct_tasks

    exams = []
    for ident, level in asked:
        domain = get_domain(ident)
        tasks = distinct_tasks(domain, level=level, split=args.split, count=args.tasks)
        if len(tasks) < args.tasks:
            print(
                f"{ident} level {level}: the split {args.split} has {len(tasks)} tasks, all asked",
                file=sys.stderr,
            )
        exams.append(Exam(domain, tasks, args.samples))
    return exams
