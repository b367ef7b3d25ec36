"""Domains by identifier, found by two groups of entry points.

`headrace.domains`: the entry point's name is the domain's identifier; its value is a class or
function that is called without arguments and returns the `Domain`. Only the domain that is asked
for is imported. `headrace.domain_families`: the value returns a `DomainFamily`, whose domains are
called `<name>.<domain>`.
"""

import difflib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from headrace.environments.protocol import Domain
from headrace.errors import ConfigError

GROUP = "headrace.domains"
FAMILIES = "headrace.domain_families"


class DomainFamily(Protocol):
    """Many domains of one origin. Making it and listing its names imports nothing heavy."""

    @property
    def missing(self) -> str:
        """The command that installs what the family needs; empty where nothing is missing."""

    def names(self) -> list[str]:
        """Names of the domains within the family."""

    def domain(self, name: str) -> Domain | None:
        """Make one; None where there is none of this name.

        Raises:
            ConfigError: it is left out, for a reason that the error gives.
        """


def domain_ids() -> list[str]:
    """Identifiers of every registered domain that is installed, sorted; imports none of them."""
    families = {
        f"{prefix}.{name}"
        for prefix in _found(FAMILIES)
        if not (family := _family(prefix)).missing
        for name in family.names()
    }
    return sorted({*_found(GROUP), *families})


def missing_families() -> dict[str, str]:
    """Families that lack something, each with the command that installs it."""
    missing = {prefix: _family(prefix).missing for prefix in _found(FAMILIES)}
    return {prefix: command for prefix, command in missing.items() if command}


@cache
def get_domain(ident: str) -> Domain:
    """Return the domain of this identifier; the same object within a process.

    Raises:
        ConfigError: no such domain is registered (the nearest one is named), its family is not
            installed, or it cannot be imported.
    """
    found = _found(GROUP)
    prefix, _, name = ident.partition(".")
    if ident in found:
        domain: Domain = _load(found[ident])
    elif made := _of_family(prefix, name):
        domain = made
    else:
        known = domain_ids()
        near = difflib.get_close_matches(ident, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown domain {ident!r}{hint} (`headrace domain list` shows all)")
    if domain.id != ident:
        raise ConfigError(
            f"domain {ident!r} ({type(domain).__qualname__}) calls itself {domain.id!r}: "
            "give the entry point and the class the same identifier"
        )
    return domain


def all_domains() -> list[Domain]:
    """Every registered domain that is installed, sorted by identifier.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    return [get_domain(ident) for ident in domain_ids()]


def _of_family(prefix: str, name: str) -> Domain | None:
    if not name or prefix not in _found(FAMILIES):
        return None
    family = _family(prefix)
    if family.missing:
        raise ConfigError(f"domain '{prefix}.{name}' is not installed: {family.missing}")
    return family.domain(name)


@cache
def _family(prefix: str) -> DomainFamily:
    family: DomainFamily = _load(_found(FAMILIES)[prefix])
    return family


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"domain {point.name!r} ({point.value}) cannot be loaded: {error}"
        ) from error


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"two packages register domain {point.name!r}: {other.value} and {point.value}"
            )
    return found
