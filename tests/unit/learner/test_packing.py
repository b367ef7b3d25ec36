import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.broker.records import ROLE_SAMPLED, Array, Span
from headrace.errors import TrainingError
from headrace.learner.packing import Cost, MicroBatch, Sample, pack, to_sample

LINEAR = Cost(token=1.0, tile=0.0)
PROMPT = [5, 9, 3, 8, 1]


def samples_of(trajectories) -> list[Sample]:
    found = [to_sample(t, [1.0] * len(t.verdict.step_scores)) for t in trajectories]
    return [sample for sample in found if sample is not None]


def sequences(batch: MicroBatch) -> list[list[int]]:
    """What every segment sees, from its prefix to its own end."""
    parts = np.split(batch.tokens, batch.cu_seqlens[1:-1])
    prefix_of = batch.prefix_of if batch.prefix_of is not None else [-1] * len(parts)
    return [
        [*(parts[p].tolist() if p >= 0 else []), *own.tolist()]
        for p, own in zip(prefix_of, parts, strict=True)
    ]


def predictions(batch: MicroBatch) -> list[tuple[tuple[int, ...], int]]:
    """For each trained token the context it is predicted from, and the token."""
    segment = np.searchsorted(batch.cu_seqlens, batch.rows, side="right") - 1
    seen = sequences(batch)
    contexts = []
    for row, number in zip(batch.rows, segment, strict=True):
        contexts.append(tuple(seen[number][: int(batch.positions[row]) + 1]))
    return list(zip(contexts, batch.targets.tolist(), strict=True))


def expected(trajectories) -> list[tuple[tuple[int, ...], int]]:
    found = []
    for trajectory in trajectories:
        tokens = trajectory.tokens.numpy().tolist()
        for span in trajectory.roles:
            if span.value == ROLE_SAMPLED:
                found += [(tuple(tokens[:i]), tokens[i]) for i in range(span.start, span.end)]
    return found


def test_a_shared_prompt_is_one_segment_and_its_last_row_predicts_every_first_token(
    make_trajectory,
):
    group = [make_trajectory(0, i, PROMPT, n) for i, n in enumerate((4, 1, 3))]
    (batch,) = pack(samples_of(group), token_budget=100, share_prompts=True, cost=LINEAR)
    # the completion of one token needs no row of its own
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 10]
    assert batch.prefix_of is not None
    assert batch.prefix_of.tolist() == [-1, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6]
    assert batch.rows.tolist() == [4, 5, 6, 7, 4, 4, 8, 9]
    assert predictions(batch) == expected(group)


def test_environment_tokens_are_context_and_never_targets(make_trajectory):
    group = [make_trajectory(0, i, PROMPT, 2, 3, 2) for i in range(2)]
    for share in (False, True):
        (batch,) = pack(samples_of(group), token_budget=100, share_prompts=share, cost=LINEAR)
        assert predictions(batch) == expected(group)
        assert len(batch.targets) == 14


def test_what_follows_the_last_sampled_token_is_not_computed(make_trajectory):
    whole = make_trajectory(0, 0, PROMPT, 4)
    tokens = [*whole.tokens.numpy().tolist(), 7, 7]
    roles = [*whole.roles, Span(2, 9, 11)]
    longer = replace(whole, tokens=Array.of("int32", tokens), roles=roles)
    (batch,) = pack(samples_of([longer]), token_budget=100, share_prompts=True, cost=LINEAR)
    assert len(batch.tokens) == 8


def test_prompts_that_differ_are_not_shared(make_trajectory):
    group = [make_trajectory(0, 0, PROMPT, 3), make_trajectory(0, 1, [5, 9, 3, 8, 2], 3)]
    (batch,) = pack(samples_of(group), token_budget=100, share_prompts=True, cost=LINEAR)
    assert batch.prefix_of is None
    assert predictions(batch) == expected(group)


def test_a_prompt_is_shared_only_where_it_pays(make_trajectory):
    group = [make_trajectory(0, i, PROMPT, 60) for i in range(3)]
    # 64 inputs are one tile each; a shared prompt of 5 rows costs two tiles a completion
    tiles = Cost(token=1.0, tile=20.0)
    for cost, shared in ((LINEAR, True), (tiles, False)):
        (batch,) = pack(samples_of(group), token_budget=400, share_prompts=True, cost=cost)
        assert (batch.prefix_of is not None) is shared


def test_a_single_sample_is_never_split_from_its_prompt(make_trajectory):
    (batch,) = pack(
        samples_of([make_trajectory(0, 0, PROMPT, 3)]),
        token_budget=100,
        share_prompts=True,
        cost=LINEAR,
    )
    assert batch.prefix_of is None
    assert batch.cu_seqlens.tolist() == [0, 7]


def test_a_sample_above_the_budget_gets_a_micro_batch_of_its_own(make_trajectory):
    group = [make_trajectory(0, i, PROMPT, n) for i, n in enumerate((3, 50, 3))]
    for share in (False, True):
        batches = pack(samples_of(group), token_budget=20, share_prompts=share, cost=LINEAR)
        sizes = [len(batch.tokens) for batch in batches]
        assert max(sizes) == 54
        assert all(size <= 20 or size == 54 for size in sizes)


def test_a_group_above_the_budget_is_split_and_pays_its_prompt_again(make_trajectory):
    group = [make_trajectory(0, i, PROMPT, 6) for i in range(4)]
    batches = pack(samples_of(group), token_budget=15, share_prompts=True, cost=LINEAR)
    assert [len(batch.tokens) for batch in batches] == [15, 15]
    assert [p for batch in batches for p in predictions(batch)] == expected(group)


def test_a_trajectory_without_sampled_tokens_adds_nothing(make_trajectory):
    assert to_sample(make_trajectory(0, 0, PROMPT), []) is None


def test_a_trajectory_without_a_prompt_is_refused(make_trajectory):
    whole = make_trajectory(4, 2, PROMPT, 4)
    bare = replace(whole, roles=[Span(ROLE_SAMPLED, 0, 9)])
    with pytest.raises(TrainingError, match=r"sample 4\.2: .* starts with a prompt"):
        to_sample(bare, [1.0])


def test_every_token_carries_its_own_version_advantage_and_sampler_logprob(make_trajectory):
    trajectory = make_trajectory(0, 0, PROMPT, 2, 3, version=6)
    sample = to_sample(trajectory, [0.25, -0.5])
    assert sample is not None
    (batch,) = pack([sample], token_budget=99, share_prompts=True, cost=LINEAR)
    assert batch.version.tolist() == [5, 5, 6, 6, 6]
    assert batch.advantage.tolist() == [0.25] * 2 + [-0.5] * 3
    np.testing.assert_array_equal(batch.behaviour, trajectory.logprobs.numpy())
    assert batch.sample.tolist() == [0] * 5


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=5),
    budget=st.integers(4, 80),
    share=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packing_trains_every_token_once_in_its_context_whatever_the_order(
    make_trajectory, lengths: list[list[int]], budget: int, share: bool, seed: int
):
    trajectories = [
        make_trajectory(g, i, PROMPT[: 1 + g], n)
        for g, group in enumerate(lengths)
        for i, n in enumerate(group)
    ]
    batches = pack(samples_of(trajectories), token_budget=budget, share_prompts=share, cost=LINEAR)
    trained = sorted(p for batch in batches for p in predictions(batch))
    assert trained == sorted(expected(trajectories))
    longest = max(len(t.tokens) - 1 for t in trajectories)
    assert all(len(batch.tokens) <= max(budget, longest) for batch in batches)
    shuffled = [trajectories[i] for i in np.random.default_rng(seed).permutation(len(trajectories))]
    again = pack(samples_of(shuffled), token_budget=budget, share_prompts=share, cost=LINEAR)
    for left, right in zip(batches, again, strict=True):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(vars(left).values(), vars(right).values(), strict=True)
        )
