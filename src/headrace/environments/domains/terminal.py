"""Jobs for a shell: several commands in one jailed session, judged by the files that they leave.

The requests of a job are made one by one: the next when the files show that the last one is met.
Success is a state of the workspace: every path as it is wanted, nothing else there, and the shell
still running. What the model printed, and with which code a command ended, are told to the model
and count for nothing. After each command the host looks at the workspace, following no link and
running nothing of the model's: that gives the step scores. The verdict, and the step score of the
last turn, come from a scorer in a fresh jail, after every process of the shell is dead.
"""

import inspect
import json
import random
from collections.abc import Sequence

import msgspec

from headrace.broker.records import Check, Execution, Verdict
from headrace.environments.domains.terminal_jobs import FOLDER, LEVELS, Job, Request
from headrace.environments.generate import draw
from headrace.environments.jailed import VERDICT_FD, Box
from headrace.environments.protocol import (
    EnvironmentFailure,
    Message,
    Observation,
    Session,
    Task,
)
from headrace.sandbox.spec import Limits, Result, SandboxSpec

MAX_TURNS = (3, 3, 4)
"""By level: one turn more than a solution needs, or two where something must be read first."""
UNASKED = "Undo what was not asked for."
"""Said when every request is met, but something else is there or gone."""
PARTIAL = 0.5
"""Largest score of an episode that does not succeed."""
_FEEDBACK_CHARS = 100
_COMMAND_CHARS = 1024
_FILE_BYTES = 4096

SPEC = SandboxSpec(toolchain="bash", disk=1 << 20, files=64)
CPU_S = 1
"""CPU seconds of each process, the shell itself included, over the whole episode."""
LIMITS = Limits(wall_s=5.0, memory=64 << 20, processes=16, output=16 << 10, cpus=0.5)
"""Of the shell, wall time per command: exceeding them is the model's failure."""


def holding(wanted: dict[str, str], found: dict[str, str]) -> list[bool]:
    """Which goals a tree meets: one per wanted path, and last that it has no other path."""
    met = [found.get(path, "absent") == state for path, state in wanted.items()]
    return [*met, set(found) <= set(wanted)]


SCORER = f"""
import json, os, sys

{inspect.getsource(holding)}

found = {{}}

def visit(folder, above):
    try:
        entries = list(os.scandir(folder))
    except PermissionError:  # what it holds cannot be known
        found[above + "."] = "special"
        return
    for entry in entries:
        path = above + entry.name
        found[path] = "special"
        if entry.is_dir(follow_symlinks=False):
            found[path] = "folder"
            visit(entry.path, path + "/")
        elif entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
            with open(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                data = file.read({_FILE_BYTES} + 1)
            if len(data) <= {_FILE_BYTES}:
                found[path] = "file:" + data.decode("latin-1").rstrip("\\n")

visit("/candidate", "")
marks = holding(json.load(sys.stdin), found)
os.write({VERDICT_FD}, "".join("01"[met] for met in marks).encode())
"""
"""Runs in a fresh jail on the dead session's workspace: one digit per goal."""


class Terminal:
    """Jobs for a shell, judged by the files that it leaves."""

    id = "terminal"
    levels = len(LEVELS)

    def task(self, index: int, *, split: str, level: int) -> Task:
        """See `Domain`."""
        job = draw(
            self.id,
            lambda rng: _ask(rng, level),
            level=level,
            levels=self.levels,
            split=split,
            index=index,
        )
        messages = [Message(role="system", content="Reply with one shell command.")]
        for said, command in LEVELS[level][1]:
            messages += [
                Message(role="user", content=said),
                Message(role="assistant", content=command),
            ]
        return Task(
            domain=self.id,
            level=level,
            split=split,
            index=index,
            messages=[*messages, Message(role="user", content=job.requests[0][0])],
            data={
                "requests": job.requests,
                "start": job.start,
                "wanted": job.wanted,
                "commands": job.commands,
            },
            max_turns=MAX_TURNS[level],
            max_new_tokens=24,
        )

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        """See `Domain`."""
        command: str = task.data["commands"][len(heard)]
        return command.replace("{}", heard[-1].split()[0]) if heard else command

    async def open(self, task: Task, *, seed: int) -> Session:
        """See `Domain`."""
        box = await Box.open(msgspec.structs.replace(SPEC, seed=seed % 2**32))
        try:
            for path, state in task.data["start"].items():
                if state != FOLDER:
                    await box.write(path, f"{state.removeprefix('file:')}\n".encode())
            await box.start_shell(f"ulimit -t {CPU_S}", limits=LIMITS)
        except BaseException:
            await box.close()
            raise
        return TerminalSession(task, box)


class TerminalSession:
    """One episode."""

    scorer = SCORER

    def __init__(self, task: Task, box: Box) -> None:
        self._requests: list[Request] = task.data["requests"]
        self._wanted: dict[str, str] = task.data["wanted"]
        self._before = [*holding(self._wanted, task.data["start"]), True]
        self._max_turns = task.max_turns
        self._box = box
        self._ended = ""
        self._progress: list[float] = []

    @property
    def executions(self) -> list[Execution]:
        """See `Session`."""
        return self._box.executions

    async def step(self, action: str) -> Observation:
        """See `Session`."""
        result = await self._box.command(extract_command(action))
        if result is None:
            self._ended = "shell_ended"
        elif not self._box.shell_runs:
            self._ended = _ending(result)
        found = await self._box.look(file_bytes=_FILE_BYTES)
        met = self._goals([] if found is None else holding(self._wanted, found))
        self._progress.append(self._progress_of(met))
        if result is None or self._ended or all(met) or len(self._progress) == self._max_turns:
            return Observation(done=True)
        return Observation(done=False, message=f"{told(result)}\n{self._next(met)}".strip())

    async def verdict(self) -> Verdict:
        """See `Session`."""
        if not self._progress:
            raise EnvironmentFailure("no_answer", "the episode was judged before its first turn")
        marks = await self._box.score(self.scorer, stdin=json.dumps(self._wanted).encode())
        if len(marks) != len(self._wanted) + 1 or set(marks) - {"0", "1"}:
            raise EnvironmentFailure("bad_verdict", f"the scorer wrote {marks[:40]!r}")
        met = self._goals([mark == "1" for mark in marks])
        progress = self._progress_of(met)
        success = all(met)
        names = [f"{path} is {state[:40]}" for path, state in self._wanted.items()]
        names += ["nothing else is there", "the shell runs"]
        missed = [name for name, each in zip(names, met, strict=True) if not each]
        return Verdict(
            score=1.0 if success else PARTIAL * progress,
            success=success,
            step_scores=gains([*self._progress[:-1], progress]),
            checks=[Check(name=name, passed=each) for name, each in zip(names, met, strict=True)],
            side="" if success else "model",
            kind="" if success else self._ended or "goals",
            evidence="" if success else f"missed: {'; '.join(missed)}",
        )

    async def close(self) -> None:
        """See `Session`."""
        await self._box.close()

    def _next(self, met: list[bool]) -> str:
        """The first request that is not met."""
        missed = {path for path, each in zip(self._wanted, met, strict=False) if not each}
        open_ones = (sentence for sentence, paths in self._requests if missed.intersection(paths))
        return next(open_ones, UNASKED)

    def _goals(self, met: list[bool]) -> list[bool]:
        """Goals of the tree (all missed where it could not be read), then that the shell runs."""
        return [*(met or [False] * (len(self._wanted) + 1)), not self._ended]

    def _progress_of(self, met: list[bool]) -> float:
        """Goals reached minus goals lost since the start, as a share of those to reach."""
        reached = sum(now and not then for now, then in zip(met, self._before, strict=True))
        lost = sum(then and not now for now, then in zip(met, self._before, strict=True))
        return max(0, reached - lost) / self._before.count(False)


def gains(progress: Sequence[float]) -> list[float]:
    """By how much each turn exceeded the best progress before it.

    A goal that is reached, lost and reached again is paid once.
    """
    best = 0.0
    steps = []
    for value in progress:
        steps.append(max(0.0, value - best))
        best = max(best, value)
    return steps


def extract_command(action: str) -> str:
    """The first fenced block, or the first line where there is none."""
    _, fence, rest = action.partition("```")
    if fence:
        language, _, block = rest.partition("```")[0].partition("\n")
        text = block or language
    else:
        text = action.strip().partition("\n")[0]
    # what a shell cannot be given: NUL, and halves of characters
    plain = text.replace("\0", "").encode("utf-8", "replace").decode()
    return plain.strip()[:_COMMAND_CHARS]


def told(result: Result) -> str:
    """What a command wrote, shortened, and its exit code when that is not 0."""
    text = (result.stdout + result.stderr).decode("utf-8", "replace").strip()[:_FEEDBACK_CHARS]
    if result.status != "ok":
        text += f"\nexit code {result.exit_code}"
    return text.strip()


def _ending(result: Result) -> str:
    """Class of the command that ended its shell."""
    if result.status in {"ok", "nonzero_exit"}:
        return "exit"
    # Nothing inside kills a jail's first process: it was the kernel, for its CPU seconds.
    return "timeout" if result.status == "signal" else result.status


def _ask(rng: random.Random, level: int) -> tuple[str, Job]:
    job = LEVELS[level][0](rng)
    return job.key, job
