import math

import pytest
from msgspec.structs import replace

from headrace.broker.records import (
    ROLE_PROMPT,
    ROLE_SAMPLED,
    Array,
    Span,
    Trajectory,
    Verdict,
    check_trajectory,
)
from headrace.errors import RecordError

VERDICT = Verdict(score=1.0, success=True, step_scores=[1.0], checks=[])
WHOLE = Trajectory(
    group=3,
    index=1,
    attempt=0,
    actor="actor",
    lineage=1,
    tokens=Array.of("int32", [4, 5, 6, 7]),
    roles=[Span(ROLE_PROMPT, 0, 2), Span(ROLE_SAMPLED, 2, 4)],
    versions=[Span(0, 2, 3), Span(1, 3, 4)],
    logprobs=Array.of("float32", [-1.0, -2.0]),
    temperature=1.0,
    verdict=VERDICT,
    turns=[],
    executions=[],
    queue_s=0.0,
    wall_s=0.0,
)


def test_a_whole_trajectory_passes():
    check_trajectory(WHOLE)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_would_poison_a_batch_is_refused(value: float):
    logprobs = Array.of("float32", [-1.0, value])
    with pytest.raises(RecordError, match=r"sample 3\.1: a log-probability is"):
        check_trajectory(replace(WHOLE, logprobs=logprobs))
    with pytest.raises(RecordError, match=r"sample 3\.1: a score is"):
        check_trajectory(replace(WHOLE, verdict=replace(VERDICT, score=value)))
    with pytest.raises(RecordError, match=r"sample 3\.1: a score is"):
        check_trajectory(replace(WHOLE, verdict=replace(VERDICT, step_scores=[value])))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("roles", [Span(ROLE_PROMPT, 0, 2), Span(ROLE_SAMPLED, 3, 4)], "not contiguous at token 2"),
        ("roles", [Span(ROLE_PROMPT, 0, 2)], "cover 2 of 4 tokens"),
        ("roles", [Span(ROLE_PROMPT, 0, 2), Span(9, 2, 4)], "unknown role 9"),
        ("logprobs", Array.of("float32", [-1.0]), "2 sampled tokens but 1 log-probabilities"),
        ("versions", [Span(0, 2, 3)], "versions do not cover"),
        ("versions", [Span(0, 1, 4)], "versions do not cover"),
        ("versions", [Span(0, 2, 4), Span(1, 4, 4)], "empty or runs backwards"),
        ("versions", [Span(0, 2, 4), Span(1, 4, 3), Span(1, 3, 4)], "empty or runs backwards"),
        ("verdict", replace(VERDICT, step_scores=[0.0, 1.0]), "2 step scores for 1 turns"),
        ("tokens", Array.of("float32", [4, 5, 6, 7]), "tokens must be int32"),
    ],
)
def test_spans_and_lengths_must_agree(field: str, value: object, message: str):
    with pytest.raises(RecordError, match=message):
        check_trajectory(replace(WHOLE, **{field: value}))
