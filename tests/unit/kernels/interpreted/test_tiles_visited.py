import pytest
import torch

from headrace.kernels.attention.launch import INTERPRETED
from headrace.kernels.attention.layout import Blocks, read_blocks, read_layout
from headrace.kernels.attention.plan import Mask, key_tiles, query_tiles
from headrace.kernels.attention.reference import attention_mask
from headrace.kernels.attention.triton_path import run_backward, run_forward
from tests.unit.kernels.cases import attention_inputs, boundaries

GROUP = torch.tensor([-1, 0, 0, -1])
SPARSE = Blocks(32, torch.tensor([[-1, -1], [0, -1], [1, 0], [-1, 0], [-1, -1], [0, -1], [-1, -1]]))


def make_mask(lengths, prefix_of=None, window=None, blocks=None):
    layout = read_layout(boundaries(lengths), prefix_of, sum(lengths))
    if blocks is None:
        return Mask(layout, window)
    return Mask(layout, window, blocks.size, read_blocks(blocks, layout))


def stretches(seen, owner):
    """Lengths of the stretches of rows that are seen, cut where `owner` changes."""
    lengths, previous = [], None
    for row in seen.nonzero()[:, 0].tolist():
        if previous == (row - 1, owner[row]):
            lengths[-1] += 1
        else:
            lengths.append(1)
        previous = (row, owner[row])
    return lengths


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([33], {}),
        ([5, 0, 33, 64, 1], {}),
        ([40, 5, 33, 20], {"prefix_of": GROUP}),
        ([40, 5, 33, 20], {"prefix_of": GROUP, "window": 11}),
        ([100, 33, 20], {"blocks": SPARSE}),
        ([100, 33, 20], {"blocks": SPARSE, "window": 40}),
    ],
)
def test_tiles_visited_equal_the_plan_and_a_count_over_the_mask(lengths, options):
    mask = make_mask(lengths, **options)
    rows = sum(lengths)
    seen = attention_mask(mask, rows)
    segment = [number for number, length in enumerate(lengths) for _ in range(length)]
    q, k, v, grad = (t.float() for t in attention_inputs(rows, 2, 1, 16))

    forward, backward, keys = INTERPRETED.forward, INTERPRETED.grad_q, INTERPRETED.grad_kv
    plans = [
        query_tiles(mask, forward.queries),
        query_tiles(mask, backward.queries),
        key_tiles(mask, keys.keys),
    ]
    inner = [forward.keys, backward.keys, keys.queries]
    counts = [torch.empty(len(plan), heads, dtype=torch.int32) for plan, heads in
              zip(plans, (2, 2, 1), strict=True)]  # fmt: skip
    out, lse = run_forward(q, k, v, mask, 0.25, counts[0])
    run_backward(q, k, v, out, lse, grad, mask, 0.25, (counts[1], counts[2]))

    for number, (plan, size) in enumerate(zip(plans, inner, strict=True)):
        planned = sorted(tile.visits(size) for tile in plan)
        counted = []
        for tile in plan:
            if number < 2:
                met = seen[tile.start : tile.stop].any(dim=0)
                owner = segment
            else:
                met = seen[:, tile.start : tile.stop].any(dim=1)
                owner = [s == segment[tile.start] for s in segment]
            counted.append(sum(-(-length // size) for length in stretches(met, owner)))
        assert planned == sorted(counted)
        # Each query head of a group is one pass over the spans of a key tile.
        visited = counts[number] if number < 2 else counts[number] // 2
        assert all(sorted(visited[:, head].tolist()) == planned for head in range(visited.shape[1]))
        assert torch.equal(counts[number], counts[number].sort(0, descending=True).values)
