import itertools

import pytest
import torch

from headrace.kernels.attention.costs import (
    Segment,
    Shape,
    attention_limit,
    cost,
    segment_pairs,
    segment_tiles,
)
from headrace.kernels.attention.launch import TABLE
from headrace.kernels.attention.layout import Blocks, read_blocks, read_layout
from headrace.kernels.attention.plan import Mask, key_tiles, query_tiles
from headrace.kernels.attention.reference import attention_mask
from tests.unit.kernels.cases import boundaries

SIZES = [(16, 16), (32, 16), (16, 32), (48, 32)]


@pytest.mark.parametrize(("rows", "inner"), SIZES)
def test_closed_forms_equal_the_plan_and_the_mask(rows, inner):
    for length, window in itertools.product(
        (0, 1, 15, 16, 17, 47, 96, 100, 161), (None, 1, 20, 64)
    ):
        layout = read_layout(boundaries([40, length]), torch.tensor([-1, 0]), 40 + length)
        mask = Mask(layout, window)
        segment = Segment(length, 1, 40)
        tiles = [tile for tile in query_tiles(mask, rows) if tile.start >= 40]
        planned = sum(tile.visits(inner) for tile in tiles)
        assert segment_tiles(segment, rows, inner, window) == planned, (length, window)
        seen = attention_mask(mask, 40 + length)[40:]
        assert segment_pairs(segment, window) == int(seen.sum())


@pytest.mark.parametrize(("rows", "inner"), [(16, 16), (32, 16), (16, 32)])
def test_closed_form_of_chosen_blocks_equals_the_plan_and_the_mask(rows, inner):
    size, chosen = 32, 3
    for length in (0, 1, 31, 32, 33, 100, 320, 333):
        layout = read_layout(boundaries([length]), None, length)
        earlier = [list(range(n))[: chosen - 1] for n in range(-(-length // size))]
        table = torch.tensor([[*row, -1, -1][: chosen - 1] for row in earlier], dtype=torch.int64)
        blocks = Blocks(size, table.reshape(-1, chosen - 1))
        mask = Mask(layout, None, size, read_blocks(blocks, layout))
        planned = sum(tile.visits(inner) for tile in query_tiles(mask, rows))
        segment = Segment(length)
        assert segment_tiles(segment, rows, inner, None, (size, chosen)) == planned, length
        assert segment_pairs(segment, None, (size, chosen)) == int(
            attention_mask(mask, length).sum()
        )


def test_key_tiles_cover_the_same_pairs_as_query_tiles():
    lengths, prefix_of = [40, 5, 33, 20], torch.tensor([-1, 0, 0, -1])
    layout = read_layout(boundaries(lengths), prefix_of, 98)
    for window in (None, 11):
        mask = Mask(layout, window)
        seen = attention_mask(mask, 98)
        for tiles, by_key in ((query_tiles(mask, 16), False), (key_tiles(mask, 16), True)):
            reached = torch.zeros_like(seen)
            for tile in tiles:
                for first, last, _ in tile.spans:
                    if by_key:
                        reached[first:last, tile.start : tile.stop] = True
                    else:
                        reached[tile.start : tile.stop, first:last] = True
            assert (reached | ~seen).all()


def test_paper_costs_of_a_million_tokens_are_immediate_and_ordered():
    launches = TABLE["sm_90", torch.bfloat16][64]
    shape = Shape(9, 3, 64)
    dense = cost([Segment(2**20)], shape, launches)
    window = cost([Segment(2**20)], shape, launches, window=4096)
    sparse = cost([Segment(2**20)], shape, launches, blocks=(128, 32))
    assert dense.pairs == 2**19 * (2**20 + 1)
    assert dense.efficiency > 0.999
    assert window.forward_tiles < dense.forward_tiles / 100
    assert sparse.forward_flops < dense.forward_flops / 100
    assert dense.backward_flops == pytest.approx(3.5 * dense.forward_flops, rel=0.01)


def test_amdahl_limits_of_known_models():
    """Qwen2.5-7B (28 layers of 28 x 128) and SmolLM2-135M (30 of 9 x 64) from their configs."""
    assert attention_limit(7_070_000_000, 28, 3584, 32768) == pytest.approx(1.47, abs=0.01)
    assert attention_limit(134_500_000, 30, 576, 4096) == pytest.approx(1.53, abs=0.01)
