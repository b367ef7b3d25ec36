"""Every configuration key with its type, default and meaning, read from the sources."""

import ast
import inspect
import itertools
import re
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from headrace import config, configlosses, configmonitor


@dataclass(frozen=True)
class Key:
    """One key that a run file or an argument may set."""

    name: str
    type: str
    default: str
    """As it is written in TOML; empty where the key must be given."""
    meaning: str


def every_key() -> list[Key]:
    """All keys in the order of the tree; `[]` stands for an element of a list of tables."""
    return _keys(config.Config, "", _docstrings())


PAGE_HEAD = """\
# Every configuration key

Made by `headrace config keys --markdown`; edit the docstrings under the keys in the sources.
A run file is TOML, with one table per section below; an argument `section.key=value` goes over it.
Keys without a default must be given. `domains` is a list of tables, written `[[domains]]`.
"""


def markdown() -> str:
    """All keys as the page `docs/configuration.md`: a table for each section."""
    about = _docstrings()["Config"]
    lines = [PAGE_HEAD]
    for section, keys in itertools.groupby(
        every_key(), lambda key: re.split(r"[.\[]", key.name)[0]
    ):
        lines += [f"## {section}", "", about[section], ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            cells = (
                f"`{key.name}`",
                key.type,
                f"`{key.default}`" if key.default else "",
                key.meaning,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _keys(kind: type[Struct], prefix: str, docs: dict[str, dict[str, str]]) -> list[Key]:
    keys: list[Key] = []
    for item in fields(kind):
        name, meaning = f"{prefix}{item.name}", docs[kind.__name__].get(item.name, "")
        tables = _tables(item.type)
        listed = get_origin(item.type) is list
        if not tables:
            keys.append(Key(name, _type_name(item.type), _default(item), meaning))
        for table in tables:
            tag = table.__struct_config__.tag
            if tag:
                keys.append(Key(f"{name}.kind", "str", f'"{tag}"', docs[table.__name__][""]))
            keys += _keys(table, f"{name}{'[]' if listed else ''}.", docs)
    return keys


def _tables(annotation: Any) -> list[type[Struct]]:
    """The tables that may stand under a key: none for a plain value, several for a union."""
    options = get_args(annotation) or (annotation,)
    return [kind for kind in options if isinstance(kind, type) and issubclass(kind, Struct)]


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, UnionType) or get_origin(annotation):
        return str(annotation)
    return str(annotation.__name__)


def _default(item: msgspec.structs.FieldInfo) -> str:
    if item.default is not msgspec.NODEFAULT:
        return msgspec.json.encode(item.default).decode()
    if item.default_factory is not msgspec.NODEFAULT:
        return msgspec.json.encode(item.default_factory()).decode()
    return ""


def _docstrings() -> dict[str, dict[str, str]]:
    """Docstring under each field, by class and field; the class's own under the empty name."""
    found: dict[str, dict[str, str]] = {}
    modules = [
        ast.parse(inspect.getsource(module)) for module in (config, configlosses, configmonitor)
    ]
    for node in [node for module in modules for node in module.body]:
        if not isinstance(node, ast.ClassDef):
            continue
        docs = found.setdefault(node.name, {"": " ".join((ast.get_docstring(node) or "").split())})
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                docs[field.target.id] = " ".join(str(text.value.value).split())
    return found
