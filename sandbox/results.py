"""From what the keeper counted to a typed result."""

import os
import re
import signal
from typing import Any

from headrace.errors import SandboxError
from headrace.sandbox.spec import Result, sha256

_EXITED = re.compile(rb"pid=\d+ \(\[STANDALONE MODE\]\) exited with status: (\d+)")
_SIGNALLED = re.compile(rb"pid=\d+ \(\[STANDALONE MODE\]\) terminated with signal: \w+ \((\d+)\)")
_NOT_LAUNCHED = b"before it has been executed"
_REPORT = re.compile(rb"\A(.*?)exit (\d+)\n\Z", re.DOTALL)
_BAD = ("[F]", "[E]", "[W]")


class Facts:
    """The keeper's answer, unpacked."""

    def __init__(self, answer: dict[str, Any], memory_file: int) -> None:
        content = memoryview(os.pread(memory_file, sum(answer["parts"].values()), 0))
        self.answer = answer
        self.parts: dict[str, bytes] = {}
        for name, size in answer["parts"].items():
            self.parts[name] = bytes(content[:size])
            content = content[size:]
        self.truncated: list[str] = answer["truncated"]

    @classmethod
    def of(cls, answer: tuple[dict[str, Any], int | None]) -> "Facts":
        """Unpack an answer and close its memory file.

        Raises:
            SandboxError: the keeper sent no outputs.
        """
        message, fd = answer
        if fd is None:
            raise SandboxError("the sandbox keeper sent no outputs")
        try:
            return cls(message, fd)
        finally:
            os.close(fd)

    def ending(self) -> tuple[int | None, int | None, str]:
        """Exit code, signal and remark of the command; all empty when the jail never ran it."""
        report = _REPORT.match(self.parts["report"])
        if report is not None:
            remark = report[1].decode("utf-8", "replace").strip()
            code = int(report[2])
            # The shell remarks on a command that a signal ended, and on none that exited.
            return (None, code - 128, "") if remark and code > 128 else (code, None, remark)
        if self.answer["exit"] is None:
            # The jail lives: a shell whose own commands wrote to its report.
            return 255, None, "the shell gave no exit code"
        log = self.parts["log"]
        if _NOT_LAUNCHED in log:
            return None, None, ""
        if match := _SIGNALLED.search(log):
            return None, int(match[1]), ""
        if match := _EXITED.search(log):
            return int(match[1]), None, ""
        return None, None, ""


def build(facts: Facts, *, isolation: str, queued_s: float) -> Result:
    """Decide how a run ended.

    The first that applies: the sandbox ended it (timeout, output limit), a limit that made it fail
    (memory, processes, disk), a signal, its exit code. A limit that was touched by a run which
    still exited with 0 is in `limits_hit` only.
    """
    answer = facts.answer
    exit_code, number, remark = facts.ending()
    hit = {
        "memory": answer["memory_kills"] > 0,
        "processes": answer["refused_processes"] > 0,
        "disk": answer["disk_full"] or number == signal.SIGXFSZ,
    }
    limits_hit = tuple(name for name, touched in hit.items() if touched)
    detail = remark
    if answer["reason"] in {"timeout", "output_limit"}:
        status, exit_code, number = answer["reason"], None, signal.SIGKILL
    elif answer["reason"]:
        status, detail = "sandbox_error", f"the run was {answer['reason']}"
    elif exit_code == 0:
        status = "ok"
    elif exit_code is None and number is None and answer["memory_kills"] == 0:
        # Before the limits: a workspace that an earlier run filled does not excuse the sandbox.
        status, detail = "sandbox_error", _last_complaint(facts.parts["log"])
    elif limits_hit:
        status = limits_hit[0]
        if exit_code is None and number is None:
            number = signal.SIGKILL
    elif number is not None:
        status = "signal"
    else:
        status = "nonzero_exit"
    return Result(
        status=status,
        exit_code=exit_code,
        signal=None if number is None else int(number),
        stdout=facts.parts["stdout"],
        stderr=facts.parts["stderr"],
        stdout_truncated="stdout" in facts.truncated,
        stderr_truncated="stderr" in facts.truncated,
        stdout_sha256=sha256(facts.parts["stdout"]),
        stderr_sha256=sha256(facts.parts["stderr"]),
        wall_s=answer["wall_s"],
        cpu_s=answer["cpu_s"],
        queued_s=queued_s,
        peak_memory=answer["peak_memory"],
        isolation=isolation,
        limits_hit=limits_hit,
        detail=detail,
    )


def _last_complaint(log: bytes) -> str:
    lines = [line for line in log.decode("utf-8", "replace").splitlines() if line[:3] in _BAD]
    return "; ".join(lines[:3]) or "nsjail ended without saying how the command did"
