"""Parity behind a slow tool: every episode waits for seconds, and some for much longer.

It exists to measure what asynchrony is for. The wait is time of a process in the jail, drawn from
the session's seed, so that two runs of one seed wait equally long. Where control groups hold its
share of a core, the process needs about a second more to start.
"""

import random

from headrace.environments.answer import AnswerSession
from headrace.environments.domains.parity import SCORER, Parity, hint, question
from headrace.environments.jailed import PYTHON, Box
from headrace.environments.protocol import EnvironmentFailure, Observation, Session, Task
from headrace.sandbox.spec import Limits, SandboxSpec

SPEC = SandboxSpec(toolchain="python", disk=1 << 20, files=16)
LIMITS = Limits(wall_s=60.0, memory=32 << 20, processes=4, cpus=0.02)
"""A small share of a core: a process that waits keeps nobody else from running."""
MEDIAN_S = 2.0
SIGMA = 1.0
"""Standard deviation of the logarithm: one wait in a hundred is ten times the median."""
LONGEST_S = 30.0


class Waiting(Parity):
    """Parity behind a tool that sleeps for 2 seconds in the median and for up to 30."""

    id = "waiting"

    async def open(self, task: Task, *, seed: int) -> Session:
        """See `Domain`."""
        drawn = MEDIAN_S * random.Random(seed).lognormvariate(0.0, SIGMA)
        return WaitingSession(await Box.open(SPEC), min(drawn, LONGEST_S), task)


class WaitingSession(AnswerSession):
    """One episode; the tool runs before the answer is taken."""

    def __init__(self, box: Box, wait_s: float, task: Task) -> None:
        super().__init__(box, program=SCORER, question=question(task), hint=hint(task))
        self._wait_s = wait_s

    async def step(self, action: str) -> Observation:
        """See `Session`."""
        program = f"import time; time.sleep({self._wait_s!r})"
        result = await self._box.run("tool", [*PYTHON, program], stdin=b"", limits=LIMITS)
        if result.status != "ok":
            raise EnvironmentFailure("tool_error", f"the wait ended with {result.status}")
        return await super().step(action)
