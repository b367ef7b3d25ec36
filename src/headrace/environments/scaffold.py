"""Writes a new domain: a small package of its own, made from the working code in `template/`."""

import importlib.util
import keyword
import re
from importlib.resources import files
from pathlib import Path

from headrace.environments.registry import domain_ids
from headrace.errors import ConfigError

MODULE, CLASS = "my_domain", "MyDomain"
"""What the template calls itself."""
_NAME = re.compile(r"[a-z](?:[a-z0-9_]*[a-z0-9])?")


def write_domain(name: str, folder: Path) -> list[Path]:
    """Write the package of a new domain; returns its files.

    Args:
        name: identifier of the domain, and name of its module.
        folder: where the package goes; must not exist.

    Raises:
        ConfigError: the name is no lower-case Python identifier or is taken, or the folder exists
            or cannot be written.
    """
    _check_name(name)
    template = files("headrace.environments.template")
    renamed = {MODULE: name, CLASS: "".join(map(str.capitalize, name.split("_")))}
    words = re.findall(r"\w+", template.joinpath(f"{MODULE}.py").read_text(encoding="utf-8"))
    if renamed[CLASS] in {*keyword.kwlist, *words} - {CLASS}:
        raise ConfigError(
            f"domain name {name!r} would make a class {renamed[CLASS]}, which its code needs for "
            "something else; choose another"
        )
    written = []
    try:
        folder.mkdir(parents=True)
        for source in ("pyproject.toml", f"{MODULE}.py", f"test_{MODULE}.py", "run.toml"):
            text = template.joinpath(source).read_text(encoding="utf-8")
            for old, new in renamed.items():
                text = text.replace(old, new)
            written.append(folder / source.replace(MODULE, name))
            written[-1].write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(
            f"{folder} exists already; name another folder with --folder, or move it away"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}); name another folder with --folder"
        ) from error
    return written


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"domain name {name!r} is no module name: use a-z, 0-9 and '_', a letter first "
            "and no '_' last, and no Python keyword"
        )
    if name in domain_ids():
        raise ConfigError(f"domain {name!r} is registered already; choose another name")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"domain name {name!r} is taken: Python imports another module by it; choose another"
        )
