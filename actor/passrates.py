"""What samples say of a model: pass@k with intervals, by domain. Loads no heavy library.

A sample that could not be judged says nothing of the model: it is counted apart and enters no rate.
"""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from headrace.monitor.progress import wilson


class Sample(Struct, frozen=True, kw_only=True):
    """One sample of one task, judged or not."""

    domain: str
    level: int
    split: str
    index: int
    """Of the task."""
    number: int
    """Of the sample among those of its task."""
    attempts: int
    """Episodes that were started for it; above 1 where the environment failed."""
    success: bool = False
    score: float = 0.0
    side: str = ""
    """Who is charged: empty, `model`, or `environment`, where the last attempt was not judged."""
    kind: str = ""
    """Class of the failure."""
    evidence: str = ""
    turns: list[str] = []
    """What the model said, turn by turn."""
    max_turns: int = 1
    """Turns that the task allows."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    wall_s: float = 0.0
    """Of the judged episode."""
    jail_cpu_s: float = 0.0

    @property
    def judged(self) -> bool:
        """Whether there is a verdict on the model."""
        return self.side != "environment"


class PassRate(Struct, frozen=True, kw_only=True):
    """Mean of pass@k over tasks, with its 95 % interval."""

    k: int
    mean: float
    low: float
    high: float


class DomainReport(Struct, frozen=True, kw_only=True):
    """What the samples of one domain and level say. Means are over judged samples."""

    domain: str
    level: int
    split: str
    tasks: int
    """Tasks with a judged sample."""
    judged: int
    unjudged: int
    """Samples on which every attempt failed on the environment's side."""
    retried: int
    """Judged samples that needed another attempt."""
    pass_at: list[PassRate]
    """For each k, over the tasks with at least k judged samples; a k that no task has is absent."""
    success_by_turn: list[float]
    """Share of samples that succeeded within 1, 2, ... turns."""
    score: float
    prompt_tokens: float
    sampled_tokens: float
    wall_s: float
    jail_cpu_s: float
    model_failures: dict[str, int]
    """Judged samples without success by class; `wrong` where the verdict names none."""
    environment_failures: dict[str, int]
    """Unjudged samples by class."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k from n samples of a task, c of them right.

    It is the probability that k samples drawn from the n without replacement hold a right one:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples and c of n, got c={c}, n={n}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def interval(values: Sequence[float], independent: int) -> tuple[float, float]:
    """95 % interval of a mean over tasks, robust to samples of one task being alike.

    Wilson's interval with the effective number of tries m (1 - m) / v, where m is the mean and v
    the variance of the mean that the spread between tasks shows (after Korn and Graubard 1998, who
    do the same to the Clopper-Pearson interval). It is at least the number of tasks, at most
    `independent` times that; with one sample a task it is Wilson's interval itself.

    Args:
        values: estimate of each task, in [0, 1].
        independent: independent tries that one task's estimate rests on, at most.
    """
    tasks = len(values)
    if tasks == 0:
        return 0.0, 1.0
    mean = math.fsum(values) / tasks
    spread = math.fsum((value - mean) ** 2 for value in values) / (tasks * max(1, tasks - 1))
    most = tasks * independent
    bernoulli = mean * (1 - mean)
    # tasks that are all right or all wrong show no spread, and prove no more than their number
    certain = bernoulli <= 0 or tasks == 1
    tries = tasks if certain else min(bernoulli / spread, most) if spread > 0 else most
    tries = max(tries, tasks)
    return wilson(mean * tries, tries)


def report(samples: Sequence[Sample], ks: Sequence[int]) -> DomainReport:
    """Sum up the samples of one domain and level.

    Args:
        samples: at least one.
        ks: numbers of samples of pass@k.
    """
    judged = [sample for sample in samples if sample.judged]
    tasks: dict[int, list[Sample]] = {}
    for sample in judged:
        tasks.setdefault(sample.index, []).append(sample)
    rates = [_pass_rate([tasks[index] for index in sorted(tasks)], k) for k in ks]
    lost = [sample for sample in judged if not sample.success]
    turns = max((sample.max_turns for sample in samples), default=1)
    return DomainReport(
        domain=samples[0].domain,
        level=samples[0].level,
        split=samples[0].split,
        tasks=len(tasks),
        judged=len(judged),
        unjudged=len(samples) - len(judged),
        retried=sum(sample.attempts > 1 for sample in judged),
        pass_at=[rate for rate in rates if rate is not None],
        success_by_turn=[
            _mean([float(s.success and len(s.turns) <= turn) for s in judged])
            for turn in range(1, turns + 1)
        ],
        score=_mean([sample.score for sample in judged]),
        prompt_tokens=_mean([sample.prompt_tokens for sample in judged]),
        sampled_tokens=_mean([sample.sampled_tokens for sample in judged]),
        wall_s=_mean([sample.wall_s for sample in judged]),
        jail_cpu_s=_mean([sample.jail_cpu_s for sample in judged]),
        model_failures=_count([sample.kind or "wrong" for sample in lost]),
        environment_failures=_count([s.kind for s in samples if not s.judged]),
    )


def reports(samples: Sequence[Sample], ks: Sequence[int]) -> list[DomainReport]:
    """One report for each domain and level, sorted."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.domain, sample.level), []).append(sample)
    return [report(groups[key], ks) for key in sorted(groups)]


def row(sample: Sample) -> bytes:
    """A sample as one line of JSON."""
    return msgspec.json.encode(sample) + b"\n"


def _pass_rate(tasks: Sequence[Sequence[Sample]], k: int) -> PassRate | None:
    enough = [task for task in tasks if len(task) >= k]
    if not enough:
        return None
    values = [pass_at_k(len(task), sum(s.success for s in task), k) for task in enough]
    low, high = interval(values, min(len(task) for task in enough) // k)
    return PassRate(k=k, mean=_mean(values), low=low, high=high)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _count(kinds: Sequence[str]) -> dict[str, int]:
    return dict(Counter(kinds).most_common())
