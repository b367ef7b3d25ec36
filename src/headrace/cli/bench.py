"""`headrace bench`: run one of the repository's benchmarks."""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

import headrace
from headrace.errors import ConfigError

HELP = """\
Run a benchmark of the repository; without a name, list them. Results are rows under
benchmarks/results/. Benchmarks are not part of an installed package: use a clone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("name", nargs="?", default="", help="name of the benchmark")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="handed to the benchmark as they are"
    )


def run(args: argparse.Namespace) -> int:
    """Run one benchmark in a fresh interpreter, or list all."""
    scripts = _scripts()
    if not args.name:
        for name, path in scripts.items():
            print(f"{name:<24}{_first_line(path)}")
        return 0
    if args.name not in scripts:
        raise ConfigError(
            f"no benchmark {args.name!r}; there are: {', '.join(scripts) or '(none)'}"
        )
    command = [sys.executable, "-P", str(scripts[args.name]), *args.arguments]
    return subprocess.run(command, check=False).returncode


def _scripts() -> dict[str, Path]:
    folder = Path(headrace.__file__).resolve().parents[2] / "benchmarks"
    if not folder.is_dir():
        raise ConfigError(
            "benchmarks are part of the repository, not of the installed package: "
            "run `headrace bench` from the environment of a clone"
        )
    return {
        path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")
    }


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0]
