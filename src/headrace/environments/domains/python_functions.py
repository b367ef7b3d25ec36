"""Short Python functions judged by unit tests in the sandbox, with a second attempt.

The model's code runs in a jail that knows the inputs and nothing else: it returns the results as
text. A scorer in a fresh jail compares them with the expected text, so that types count, objects
cannot lie about equality, and neither printed words, exit codes nor edited files change a score.
One test is visible: its outcome is what a failed first attempt is told. The others are hidden.
"""

import random
import signal
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from headrace.broker.records import Check, Execution, Verdict
from headrace.environments.domains.python_questions import LEVELS, Question
from headrace.environments.generate import draw
from headrace.environments.jailed import PYTHON, VERDICT_FD, Box
from headrace.environments.protocol import (
    EnvironmentFailure,
    Message,
    Observation,
    Session,
    Task,
)
from headrace.sandbox.spec import Limits, Result, SandboxSpec

HIDDEN_TESTS = 6
MAX_TURNS = 2
SECOND_ATTEMPT = 0.5
"""Factor of the score when the first attempt failed."""
PARTIAL = 0.5
"""Largest score of code that fails a hidden test."""
_CODE_LIMIT = 4096
_FEEDBACK_CHARS = 120

SPEC = SandboxSpec(toolchain="python", disk=4 << 20, files=64)
CPU_S = 1
"""CPU seconds of a candidate; unlike wall time they do not depend on how busy the host is."""
LIMITS = Limits(wall_s=15.0, memory=128 << 20, processes=8, output=16 << 10, cpus=0.5)
"""Of the candidate: exceeding them is the model's failure."""

RUNNER = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S + 1}))
inputs = eval(sys.argv[1])
out = os.dup(1)
os.write(out, b"ready\\n")
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
plain = (int, float, bool, str, type(None))
def show(value):
    kind = type(value)
    if kind in plain:
        return repr(value)
    if kind is list:
        return "[" + ", ".join(map(show, value)) + "]"
    if kind is tuple:
        return "(" + ", ".join(map(show, value)) + ("," if len(value) == 1 else "") + ")"
    return "<" + kind.__name__ + ">"
def line(word, text):
    return word + " " + text.encode("unicode_escape").decode()[:200]
def failure(word, error):
    return line(word, type(error).__name__ + ": " + str(error))
def lines():
    source = sys.stdin.buffer.read().decode()
    try:
        code = compile(source, "answer", "exec")
    except (SyntaxError, ValueError) as error:
        return [failure("compile", error)]
    names = {{"__name__": "answer"}}
    try:
        exec(code, names)
    except BaseException as error:
        return [failure("runtime", error)]
    if "f" not in names:
        return ["runtime NameError: the function f is not defined"]
    answers = []
    for values in inputs:
        try:
            answers.append(line("value", show(names["f"](*values))))
        except BaseException as error:
            answers.append(failure("runtime", error))
    return answers
os.write(out, ("\\n".join(lines()) + "\\n").encode())
os._exit(0)
"""
"""Runs in the candidate's jail: says that it is ready before it reads the code, then prints one
line per input, or one line that says why there are none."""

SCORER = f"""
import os, sys
lines = sys.stdin.buffer.read().split(b"\\n")
count = int(lines[0])
expected, got = lines[1:count + 1], lines[count + 1:]
assert len(got) == count
marks = "".join("1" if pair[0] == pair[1] else "0" for pair in zip(expected, got))
os.write({VERDICT_FD}, marks.encode())
"""
"""Runs in a fresh jail: one digit per hidden test, 1 where the texts are the same bytes."""


class PythonFunctions:
    """Short Python functions, judged by hidden tests, with a second attempt after an error."""

    id = "python_functions"
    levels = len(LEVELS)

    def task(self, index: int, *, split: str, level: int) -> Task:
        """See `Domain`."""
        question = draw(
            self.id,
            lambda rng: _ask(rng, level),
            level=level,
            levels=self.levels,
            split=split,
            index=index,
        )
        signature = f"f({', '.join(question.parameters)})"
        asked = f"{signature}: returns {question.text}"
        # the same question has the same tests, so that it is one task however often it is drawn
        inputs = question.inputs(random.Random(asked), HIDDEN_TESTS + 1)
        return Task(
            domain=self.id,
            level=level,
            split=split,
            index=index,
            messages=[
                Message(role="system", content="Write the Python function."),
                Message(role="user", content=question.example[0]),
                Message(role="assistant", content=question.example[1]),
                Message(role="user", content=asked),
            ],
            data={
                "oracle": f"def {signature}: return {question.code}",
                "inputs": inputs,
                "expected": [repr(question.function(*values)) for values in inputs],
            },
            max_turns=MAX_TURNS,
            max_new_tokens=40,
        )

    def oracle(self, task: Task, heard: Sequence[str]) -> str:
        """See `Domain`."""
        oracle: str = task.data["oracle"]
        return oracle

    async def open(self, task: Task, *, seed: int) -> Session:
        """See `Domain`."""
        return PythonSession(task, await Box.open(msgspec.structs.replace(SPEC, seed=seed % 2**32)))


class Attempt(Struct, frozen=True):
    """What came of one model turn."""

    kind: str
    """Empty when every test passed, or `compile`, `runtime`, `assertion`, `timeout`, ..."""
    feedback: str
    values: list[str] | None
    """One text per input, or None when the code returned none."""


class PythonSession:
    """One episode."""

    runner = RUNNER
    scorer = SCORER

    def __init__(self, task: Task, box: Box) -> None:
        self._asked = task.messages[-1].content
        self._inputs: list[list[object]] = task.data["inputs"]
        self._expected: list[str] = list(task.data["expected"])
        self._box = box
        self._attempts: list[Attempt] = []

    @property
    def executions(self) -> list[Execution]:
        """See `Session`."""
        return self._box.executions

    async def step(self, action: str) -> Observation:
        """See `Session`."""
        code = extract_code(action).encode("utf-8", "replace")[:_CODE_LIMIT]
        result = await self._box.run(
            "tool", [*PYTHON, self.runner, repr(self._inputs)], stdin=code, limits=LIMITS
        )
        attempt = self._read(result)
        self._attempts.append(attempt)
        done = not attempt.kind or len(self._attempts) == MAX_TURNS
        return Observation(done=done, message=f"{attempt.feedback}\n{self._asked}")

    async def verdict(self) -> Verdict:
        """See `Session`."""
        if not self._attempts:
            raise EnvironmentFailure("no_answer", "the episode was judged before its first turn")
        last = self._attempts[-1]
        marks = await self._marks(last)
        passed = marks.count("1")
        success = passed == HIDDEN_TESTS
        score = 1.0 if success else PARTIAL * passed / HIDDEN_TESTS
        if len(self._attempts) > 1:
            score *= SECOND_ATTEMPT
        kind = "" if success else last.kind or "assertion"
        return Verdict(
            score=score,
            success=success,
            step_scores=[0.0] * (len(self._attempts) - 1) + [score],
            checks=[
                Check(name=f"hidden_{number}", passed=mark == "1")
                for number, mark in enumerate(marks)
            ],
            side="" if success else "model",
            kind=kind,
            evidence="" if success else last.feedback,
        )

    async def close(self) -> None:
        """See `Session`."""
        await self._box.close()

    def _read(self, result: Result) -> Attempt:
        ready, *rest = result.stdout.decode("utf-8", "replace").split("\n")
        if ready != "ready":
            stderr = result.stderr.decode("utf-8", "replace").strip()
            raise EnvironmentFailure(
                "runner_error", f"the jail ended with {result.status} before it began: {stderr}"
            )
        status = "timeout" if result.signal == signal.SIGXCPU else result.status
        if status not in {"ok", "nonzero_exit", "signal"}:
            return Attempt(status, f"f hit a limit: {status}.", None)
        lines = [line.partition(" ") for line in rest[:-1]]
        if len(lines) == 1 and lines[0][0] in {"compile", "runtime"}:
            return Attempt(lines[0][0], f"{lines[0][2][:_FEEDBACK_CHARS]}.", None)
        if status != "ok" or len(lines) != len(self._inputs):
            return Attempt("exit", "f ended the program instead of returning.", None)
        call = f"f({', '.join(map(repr, self._inputs[0]))})"
        word, _, text = lines[0]
        values = [value if word == "value" else "" for word, _, value in lines]
        shown = text[:_FEEDBACK_CHARS]
        if word != "value":
            return Attempt("runtime", f"{call} raised {shown}.", values)
        if text != self._expected[0]:
            return Attempt(
                "assertion", f"{call} returned {shown}, not {self._expected[0]}.", values
            )
        if values != self._expected:
            return Attempt("assertion", "A hidden test failed.", values)
        return Attempt("", "", values)

    async def _marks(self, attempt: Attempt) -> str:
        """One digit per hidden test. Code that returned nothing failed them all."""
        if attempt.values is None:
            return "0" * HIDDEN_TESTS
        hidden = [self._expected[1:], attempt.values[1:]]
        stdin = "\n".join([str(HIDDEN_TESTS), *hidden[0], *hidden[1]])
        marks = await self._box.score(self.scorer, stdin=stdin.encode())
        if len(marks) != HIDDEN_TESTS or set(marks) - {"0", "1"}:
            raise EnvironmentFailure("bad_verdict", f"the scorer wrote {marks[:40]!r}")
        return marks


def extract_code(action: str) -> str:
    """The first fenced block, or the whole text where there is none."""
    _, fence, rest = action.partition("```")
    if not fence:
        return action.strip()
    return rest.partition("```")[0].removeprefix("python").strip()


def _ask(rng: random.Random, level: int) -> tuple[str, Question]:
    question = rng.choice(LEVELS[level])(rng)
    return question.key, question
