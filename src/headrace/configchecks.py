"""What the values of a configuration may be, and how a key that does not exist is worded."""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from msgspec import Struct

_POOL = re.compile(r"[a-z0-9_-]+")


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the configuration."""


def at_least(name: str, value: float, least: float, why: str = "") -> None:
    """Refuse a number below `least`, and one that is not finite.

    Raises:
        ValueError: naming key, bound and value.
    """
    if not least <= value < math.inf:
        bound = f"at least {least}" if math.isfinite(value) else f"finite and at least {least}"
        raise ValueError(f"{name} must be {bound}, got {value}" + (why and f": {why}"))


def above(name: str, value: float, bound: float) -> None:
    """Refuse a number that is not above `bound`, and one that is not finite.

    Raises:
        ValueError: naming key, bound and value.
    """
    if not bound < value < math.inf:
        finite = "" if math.isfinite(value) else "finite and "
        raise ValueError(f"{name} must be {finite}above {bound}, got {value}")


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not one of the choices.

    Raises:
        ValueError: naming key, value, choices and the nearest one.
    """
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")


def pool_name(name: str, value: str) -> None:
    """Refuse what cannot be part of a broker's subject.

    Raises:
        ValueError: naming key and value.
    """
    if not _POOL.fullmatch(value):
        raise ValueError(f"{name} must consist of a-z, 0-9, '-' and '_', got {value!r}")


def no_double(name: str, values: Sequence[str]) -> None:
    """Refuse a list that names the same thing twice.

    Raises:
        ValueError: naming key and the first value that comes again.
    """
    for number, value in enumerate(values):
        if value in values[:number]:
            raise ValueError(f"{name} names {value!r} more than once")


def explain(message: str, tree: dict[str, Any], root: type[Struct]) -> str:
    """Name the key's full path and the nearest existing key, where a key is unknown.

    Args:
        message: msgspec's, which ends in the path of what is wrong.
        tree: the values that were refused.
        root: the struct that they were meant for.
    """
    text, _, path = message.partition(" - at `$")
    keys = [part for part in path.rstrip("`").replace("[", ".[").split(".") if part]
    struct = _struct_at(keys, tree, root)
    names = struct.__struct_fields__ if struct else ()
    if "unknown field" not in text:
        # a check's own sentence begins with the key
        joint = "." if text.partition(" ")[0] in names else ": "
        return f"{'.'.join(keys).replace('.[', '[')}{joint}{text}" if keys else text
    unknown = text.rpartition("`")[0].rpartition("`")[2]
    everywhere = _all_keys(root)
    full = ".".join([*keys, unknown]).replace(".[", "[")
    elsewhere = [key for key in everywhere if key.endswith(f".{unknown}")]
    siblings = difflib.get_close_matches(unknown, names, n=1, cutoff=0.5)
    near = elsewhere or [".".join([*keys, name]).replace(".[", "[") for name in siblings]
    near = near or difflib.get_close_matches(full, everywhere, n=1, cutoff=0.5)
    hint = near[0] if near else ""
    return f"unknown key {full!r}" + (f"; did you mean {hint!r}?" if hint else "")


def _struct_at(keys: list[str], tree: dict[str, Any], root: type[Struct]) -> Any:
    kind: Any = root
    value: Any = tree
    for key in keys:
        if key.startswith("["):
            kind = get_args(kind)[0]
            value = value[0] if isinstance(value, list) and value else {}
        else:
            kind = kind.__annotations__.get(key)
            value = value.get(key, {}) if isinstance(value, dict) else {}
        if get_args(kind) and get_origin(kind) is not list:
            wanted = value.get("kind") if isinstance(value, dict) else None
            variants = get_args(kind)
            kind = next((v for v in variants if v.__struct_config__.tag == wanted), variants[0])
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _all_keys(kind: type[Struct], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in kind.__struct_fields__:
        annotation = kind.__annotations__.get(name)
        full = f"{prefix}{name}"
        keys.append(full)
        if isinstance(annotation, type) and issubclass(annotation, Struct):
            keys += _all_keys(annotation, f"{full}.")
    return keys
