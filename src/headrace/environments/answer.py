"""Sessions of one turn whose answer a scorer in the jail judges."""

from headrace.broker.records import Check, Execution, Verdict
from headrace.environments.jailed import Box
from headrace.environments.protocol import EnvironmentFailure, Observation

_ANSWER_BYTES = 4096


class AnswerSession:
    """Hands the model's answer to a scorer program, which writes `1` or `0` as its verdict.

    The program reads the task's question on the first line of its standard input, as one line that
    the domain chose, and the answer after it.
    """

    def __init__(self, box: Box, *, program: str, question: str, hint: str) -> None:
        """Judge by `program`; `hint` is the evidence that a wrong answer leaves."""
        self._box = box
        self._program = program
        self._question = question
        self._hint = hint
        self._answer: str | None = None

    @property
    def executions(self) -> list[Execution]:
        """See `Session`."""
        return self._box.executions

    async def step(self, action: str) -> Observation:
        """See `Session`."""
        self._answer = action
        return Observation(done=True)

    async def verdict(self) -> Verdict:
        """See `Session`."""
        if self._answer is None:
            raise EnvironmentFailure("no_answer", "the episode was judged before its first turn")
        answer = self._answer.encode("utf-8", "replace")[:_ANSWER_BYTES]
        mark = await self._box.score(self._program, stdin=self._question.encode() + b"\n" + answer)
        if mark not in {"0", "1"}:
            raise EnvironmentFailure("bad_verdict", f"the scorer wrote {mark[:40]!r}")
        right = mark == "1"
        score = 1.0 if right else 0.0
        return Verdict(
            score=score,
            success=right,
            step_scores=[score],
            checks=[Check(name="answer", passed=right)],
            side="" if right else "model",
            kind="" if right else "wrong_answer",
            evidence="" if right else f"{self._hint}, got {self._answer[:80]!r}",
        )

    async def close(self) -> None:
        """See `Session`."""
        await self._box.close()
