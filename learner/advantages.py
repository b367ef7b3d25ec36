"""From the scores of a group to one advantage for each model turn of its samples.

Plain Python floats and no torch: the state machine over the log decides with `informative` whether
a group is trained or filtered, and must agree to the bit with what the trainer sees.
"""

import math
import random
from collections.abc import Callable, Sequence

MIN_SPREAD = 1e-6
"""Scores closer together than this are equal; what remains is rounding, not reward."""
MIN_STD = 1e-3
"""Smallest standard deviation that is divided by. Scores that were float32 at any time leave a
residue near 1e-8 where they are equal, and dividing by it would blow noise up to full size."""


def informative(scores: Sequence[float]) -> bool:
    """Whether a group teaches anything: the spread of its valid scores is above `MIN_SPREAD`.

    Args:
        scores: final scores of the group's trajectories; failed slots are left out.
    """
    return len(scores) > 1 and max(scores) - min(scores) > MIN_SPREAD


def group_mean(scores: Sequence[float]) -> list[float]:
    """A_i = s_i - mean(s).

    Source: "Understanding R1-Zero-Like Training" (Dr. GRPO), arXiv 2503.20783, which drops the
    division because it weighs nearly solved and nearly hopeless groups up.
    """
    mean = math.fsum(scores) / len(scores)
    return [score - mean for score in scores]


def group_std(scores: Sequence[float]) -> list[float]:
    """A_i = (s_i - mean(s)) / max(std(s), MIN_STD), with the population standard deviation.

    Source: DeepSeekMath (GRPO), arXiv 2402.03300, equation for outcome supervision.
    """
    centred = group_mean(scores)
    std = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / max(std, MIN_STD) for value in centred]


def leave_one_out(scores: Sequence[float]) -> list[float]:
    """A_i = s_i - mean of the other scores = n / (n - 1) * (s_i - mean(s)).

    The baseline does not depend on the sample it is subtracted from, so the gradient is unbiased.
    Source: RLOO, "Back to Basics", arXiv 2402.14740.
    """
    count = len(scores)
    return [value * count / (count - 1) for value in group_mean(scores)]


ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}
"""By the value of `learner.advantage`."""


def advantages(kind: str, scores: Sequence[float]) -> list[float]:
    """Advantage of every sample of one group, in the order of the scores.

    Args:
        kind: a key of `ESTIMATORS`.
        scores: final scores of the group's trajectories; failed slots are left out.

    Returns:
        One advantage a score; all 0 where the group is not informative.
    """
    if not informative(scores):
        return [0.0] * len(scores)
    return ESTIMATORS[kind](scores)


def turn_advantages(
    kind: str,
    scores: Sequence[float],
    step_scores: Sequence[Sequence[float]],
    step_weight: float,
    *,
    shuffle: random.Random | None = None,
) -> list[list[float]]:
    """Advantage of every model turn: (1 - w) * A(outcome) + w * A(return of the turn).

    The return of turn t is the sum of the step scores from t on. It is compared with the returns at
    turn t of those samples of the group that have such a turn, so that a turn is not blamed for
    what came before it.

    Source: "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment"
    (MT-GRPO), arXiv 2505.11821, with rewards to go in the place of single rewards.

    Args:
        kind: a key of `ESTIMATORS`.
        scores: final scores of the group's trajectories.
        step_scores: one list for each trajectory, one score for each of its turns.
        step_weight: w, from 0 (outcome alone) to 1 (returns alone).
        shuffle: permutes the scores, and the returns of each turn, among the samples: a control
            that must teach nothing.

    Returns:
        One list for each trajectory, one advantage for each of its turns.
    """

    def compared(values: Sequence[float]) -> list[float]:
        order = list(values)
        if shuffle is not None:
            shuffle.shuffle(order)
        return advantages(kind, order)

    outcome = compared(scores)
    mixed = [[value] * len(steps) for value, steps in zip(outcome, step_scores, strict=True)]
    if step_weight == 0:
        return mixed
    returns = [[math.fsum(steps[turn:]) for turn in range(len(steps))] for steps in step_scores]
    for turn in range(max(map(len, returns))):
        present = [sample for sample, values in enumerate(returns) if len(values) > turn]
        values = compared([returns[sample][turn] for sample in present])
        for sample, value in zip(present, values, strict=True):
            mixed[sample][turn] = (1 - step_weight) * outcome[sample] + step_weight * value
    return mixed
