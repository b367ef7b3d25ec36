"""One log format for every process: JSON lines in the run folder, short lines on stderr.

Modules log through `logging.getLogger(__name__)`. What an event is about is said once, by `about`
around the work or in `extra`, under the names of `CONTEXT`, so that all files of a run can be
searched by one schema.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

import msgspec

from headrace.errors import ConfigError
from headrace.report.untrusted import visible

CONTEXT = ("group", "sample", "domain", "version")
"""Keys that are carried into the JSON lines: the group's ordinal, the index of a sample in it, the
domain, and the policy version."""
_about: ContextVar[Mapping[str, int | str]] = ContextVar("about")

_HUMAN = "%(asctime)s %(levelname).1s {role} %(message)s"


@contextmanager
def about(**context: int | str) -> Iterator[None]:
    """Let all that is logged in the block, and in tasks that it starts, carry this context.

    Args:
        context: values for some of `CONTEXT`.
    """
    token = _about.set({**_about.get({}), **context})
    try:
        yield
    finally:
        _about.reset(token)


class _HumanLines(logging.Formatter):
    """Lines for a terminal: evidence of failures may hold what a jailed program wrote."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return visible(super().format(record))


class _JsonLines(logging.Formatter):
    """One JSON object per record: time, level, role, id, run, event, and the context given."""

    def __init__(self, role: str, ident: str, run: str) -> None:
        super().__init__()
        self._who = {"role": role, "id": ident, "run": run}

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        line = {"time": record.created, "level": record.levelname.lower(), **self._who}
        line["event"] = record.getMessage()
        line["logger"] = record.name
        context = {**_about.get({}), **record.__dict__}
        line |= {key: context[key] for key in CONTEXT if key in context}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def setup_logging(
    role: str,
    ident: str,
    run_dir: Path | None,
    *,
    run: str = "",
    stream: TextIO | None = None,
    level: int = logging.INFO,
) -> None:
    """Send this process's log records to stderr and, with a run folder, to its own JSON file.

    Calling it again replaces the former destinations.

    Args:
        role: `broker`, `learner`, `actor` or the command's name.
        ident: identifier of the process within its role.
        run_dir: run folder; the file is `logs/<role>-<ident>.jsonl` in it, appended to.
        run: name of the run; the folder's name where empty.
        stream: where the human lines go; stderr where not given.
        level: lowest level of headrace's own records; other libraries' start at warning.

    Raises:
        ConfigError: the run folder cannot be written.
    """
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "headrace", False):
            root.removeHandler(old)
            old.close()
    human = logging.StreamHandler(stream or sys.stderr)
    who = f"{role}-{ident}" if ident else role
    human.setFormatter(_HumanLines(_HUMAN.format(role=who), "%H:%M:%S"))
    handlers: list[logging.Handler] = [human]
    if run_dir is not None:
        path = run_dir / "logs" / f"{who}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"run.dir {run_dir}: {path} cannot be written ({error.strerror}); "
                "choose another folder"
            ) from error
        file.setFormatter(_JsonLines(role, ident, run or run_dir.name))
        handlers.append(file)
    for handler in handlers:
        handler.headrace = True  # type: ignore[attr-defined]  # how a second call finds them
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("headrace").setLevel(level)
