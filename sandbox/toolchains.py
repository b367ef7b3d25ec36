"""Toolchains as data: which trees a jail sees, which commands it has, how failures look.

The built-in ones are in `toolchains.toml`; more are added by naming further files in a spec.
"""

import os
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from headrace.errors import SandboxError
from headrace.sandbox.spec import Limits, Mount, Result

PACKAGES = "/opt/packages"
"""Folder of a jail that shows a toolchain's packages."""

_BUILT_IN = Path(__file__).with_name("toolchains.toml")


class Toolchain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One toolchain."""

    mounts: list[str]
    """Host paths shown read-only: `/path`, or `/path=/path/in/jail`. A path ending in `?` may be
    missing on the host. `{python}` is the prefix of the interpreter that runs headrace, and
    `{pythonX.Y}` the name of its library folder, here and in `hide` and `path`."""
    hide: list[str] = field(default_factory=list)
    """Folders inside the mounts that are shown empty."""
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic links in the jail's root."""
    path: list[str]
    """Folders in which commands are looked up, in the jail."""
    env: dict[str, str] = field(default_factory=dict)
    """Fixed environment."""
    packages: list[str] = field(default_factory=list)
    """Installed distributions, by their names on a package index, that Python code in the jail can
    import from the environment of headrace. What they require is not added: name it as well."""
    limits: Limits = Limits()
    """Limits of a run where neither the run nor its session brings any."""
    build: list[str] = field(default_factory=list)
    """Command that compiles `{sources}` into `{program}`; empty for interpreted languages."""
    run: list[str] = field(default_factory=list)
    """Command that runs `{program}`."""
    compile_error: str = ""
    """Pattern in the standard error of a source that does not compile."""
    assertion: str = ""
    """Pattern in the standard error of a failed assertion."""
    exception: str = ""
    """Pattern in the standard error of an uncaught exception."""

    def resolved(self) -> list[Mount]:
        """Existing host paths and where they appear.

        Raises:
            SandboxError: a path that may not be missing is, or a package is not installed.
        """
        found = [mount for name in self.packages for mount in _package(name)]
        for entry in self.mounts:
            text = _expand(entry)
            optional = text.endswith("?")
            source, _, target = text.removesuffix("?").partition("=")
            if Path(source).exists():
                # The real path: a link would be followed in the jail's half-built root.
                found.append(Mount(source=os.path.realpath(source), target=target or source))
            elif not optional:
                raise SandboxError(f"the toolchain's tree {source} does not exist on this host")
        return found

    def hidden(self) -> list[str]:
        """Folders to cover, where they exist."""
        return [folder for folder in map(_expand, self.hide) if Path(folder).is_dir()]

    def search_path(self) -> str:
        """Value of `PATH` in the jail."""
        return ":".join(map(_expand, self.path))

    def find(self, command: str, mounts: list[Mount]) -> str:
        """Absolute path, in the jail, of a command given by name.

        Raises:
            SandboxError: no folder of `path` has it.
        """
        for folder in map(_expand, self.path):
            inside = f"{folder}/{command}"
            for mount in sorted(mounts, key=lambda each: -len(each.target)):
                below = os.path.relpath(inside, mount.target)
                if below == ".." or below.startswith("../"):
                    continue
                if os.access(Path(mount.source) / below, os.X_OK):
                    return inside
                break
        raise SandboxError(
            f"the toolchain has no command {command!r} in {':'.join(self.path)}; give a path, or "
            "another toolchain"
        )

    def build_command(self, sources: list[str], program: str) -> list[str]:
        """Argv that compiles sources into a program; empty where nothing is compiled."""
        argv: list[str] = []
        for part in self.build:
            argv += sources if part == "{sources}" else [part.replace("{program}", program)]
        return argv

    def run_command(self, program: str) -> list[str]:
        """Argv that runs a program, or a source file of an interpreted language."""
        return [part.replace("{program}", program) for part in self.run]

    def diagnose(self, result: Result) -> str:
        """Name the kind of a failure: `compile_error`, `assertion`, `exception`, or the status."""
        if result.status not in {"nonzero_exit", "signal"}:
            return result.status
        text = result.stderr.decode("utf-8", "replace")
        for kind in ("compile_error", "assertion", "exception"):
            pattern = getattr(self, kind)
            if pattern and re.search(pattern, text, re.MULTILINE):
                return kind
        return result.status


def load(files: tuple[str, ...] = ()) -> dict[str, Toolchain]:
    """Read the built-in toolchains and those of further files, which may not redefine one.

    A table with `extends` has every key of the toolchain that it names, unless it brings its own.

    Raises:
        SandboxError: a file is missing, is not TOML, holds something else than toolchains, or
            extends one that is not defined before it.
    """
    found: dict[str, Toolchain] = {}
    raw: dict[str, dict[str, Any]] = {}
    for path in (_BUILT_IN, *map(Path, files)):
        try:
            tree: dict[str, dict[str, Any]] = tomllib.loads(path.read_text())
            for name, table in tree.items():
                raw[name] = _extended(path, name, table, raw)
            tables = msgspec.convert({name: raw[name] for name in tree}, dict[str, Toolchain])
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise SandboxError(f"toolchains in {path}: {error}") from error
        for name in tables.keys() & found.keys():
            raise SandboxError(f"toolchains in {path}: {name!r} is defined already")
        found |= tables
    return found


def _extended(path: Path, name: str, table: Any, raw: dict[str, dict[str, Any]]) -> Any:
    if not isinstance(table, dict) or "extends" not in table:
        return table
    base = table["extends"]
    parent = raw.get(base) if isinstance(base, str) else None
    if not isinstance(parent, dict):
        raise SandboxError(
            f"toolchains in {path}: {name!r} extends {base!r}, which is not defined before it"
        )
    own = {key: value for key, value in table.items() if key != "extends"}
    return {**parent, **own}


@cache
def _package(name: str) -> list[Mount]:
    """The folders and modules that an installed distribution has beside each other."""
    try:
        found = distribution(name)
    except PackageNotFoundError as error:
        raise SandboxError(
            f"the toolchain's package {name!r} is not installed in {sys.prefix}"
        ) from error
    tops = {path.parts[0] for path in found.files or [] if path.suffix != ".pth"}
    tops = {top for top in tops if top not in {"..", "__pycache__"}}
    return [
        Mount(source=os.path.realpath(str(found.locate_file(top))), target=f"{PACKAGES}/{top}")
        for top in sorted(tops)
        if not top.endswith(".dist-info")
    ]


def _expand(text: str) -> str:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return text.replace("{python}", sys.base_prefix).replace("{pythonX.Y}", version)
