"""Domains by identifier, found by the entry-point group `headrace.domains`.

An entry point's name is the domain's identifier; its value is a class or function that is called
without arguments and returns the `Domain`. Only the domain that is asked for is imported.
"""

import difflib
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from headrace.environments.protocol import Domain
from headrace.errors import ConfigError

GROUP = "headrace.domains"


def domain_ids() -> list[str]:
    """Identifiers of every registered domain, sorted; imports none of them."""
    return sorted(_found())


@cache
def get_domain(ident: str) -> Domain:
    """Return the domain of this identifier; the same object within a process.

    Raises:
        ConfigError: no such domain is registered (the nearest one is named), or it cannot be
            imported.
    """
    found = _found()
    if ident not in found:
        near = difflib.get_close_matches(ident, found, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"unknown domain {ident!r}{hint} (registered: {', '.join(sorted(found))})"
        )
    point = found[ident]
    try:
        domain: Domain = point.load()()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"domain {ident!r} ({point.value}) cannot be loaded: {error}") from error
    if domain.id != ident:
        raise ConfigError(
            f"domain {ident!r} ({point.value}) calls itself {domain.id!r}: "
            "give the entry point and the class the same identifier"
        )
    return domain


def all_domains() -> list[Domain]:
    """Every registered domain, sorted by identifier.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    return [get_domain(ident) for ident in domain_ids()]


def _found() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"two packages register domain {point.name!r}: {other.value} and {point.value}"
            )
    return found
