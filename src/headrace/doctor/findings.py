"""What a check finds, in the one form that is printed, sent and tested."""

from msgspec import Struct

OK = "ok"
WARNING = "warning"
FAILED = "failed"
NOT_NEEDED = "not needed"
STATES = (OK, WARNING, FAILED, NOT_NEEDED)


class Finding(Struct, frozen=True, kw_only=True):
    """One line of the table."""

    check: str
    state: str
    """One of `STATES`."""
    found: str
    """What is the case, with its numbers."""
    remedy: str = ""
    """What to do, naming a command; never empty where something failed."""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"{self.check}: state {self.state!r} is not one of {STATES}")
        if self.state in {FAILED, WARNING} and not self.remedy:
            raise ValueError(f"{self.check}: a {self.state} check must say what to do")


def ok(check: str, found: str, remedy: str = "") -> Finding:
    """Everything is as it should be; `remedy` says how to get what is optional."""
    return Finding(check=check, state=OK, found=found, remedy=remedy)


def warning(check: str, found: str, remedy: str) -> Finding:
    """It works, but worse than it could."""
    return Finding(check=check, state=WARNING, found=found, remedy=remedy)


def failed(check: str, found: str, remedy: str) -> Finding:
    """Something will not work."""
    return Finding(check=check, state=FAILED, found=found, remedy=remedy)


def not_needed(check: str, found: str) -> Finding:
    """Nothing depends on it here."""
    return Finding(check=check, state=NOT_NEEDED, found=found)
