"""The cut of a model's blocks into stages: every block once, and the longest stage as short as it can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.models.cuts import Cut, make_cut
from swift.schedules.problem import cut_by_costs


@st.composite
def draw_cuts(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    return Cut(tuple(draw(st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes)))), sizes)


@given(draw_cuts())
def test_every_block_has_one_row_of_its_kind(cut):
    blocks = [(stage, block) for stage, size in enumerate(cut.sizes) for block in range(size)]
    assert cut.is_block_PB.sum() == len(cut.moe_layers)
    for is_moe in (None, False, True):
        mine = [layer for layer, kind in enumerate(cut.moe_layers) if is_moe is None or kind == is_moe]
        rows = cut.model_index(is_moe)
        assert sorted(rows[rows >= 0].tolist()) == list(range(len(mine)))
        assert [rows[place] for place in zip(*cut.locations(is_moe), strict=True)] == list(range(len(mine)))
        for number, layer in enumerate(mine):
            stage, block = blocks[layer]
            row = block if is_moe is None else cut.stack_index_PB[stage, block]
            assert rows[stage, row] == number
            assert cut.is_moe_PB[stage, block] == cut.moe_layers[layer]
            if is_moe is not None:
                assert cut.stage_index(is_moe)[stage, row] == block
                assert cut.joined_index_PB[stage, block] == row + (cut.stack_size(False) if is_moe else 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
def test_the_longest_stage_is_as_short_as_it_can_be(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))

    def longest(sizes):
        ends = list(itertools.accumulate(sizes, initial=0))
        times = [sum(costs[begin:end]) for begin, end in itertools.pairwise(ends)]
        times[0] += first
        times[-1] += last
        return max(times)

    ways = [np.diff([0, *ends, len(costs)]) for ends in itertools.combinations(range(1, len(costs)), num_stages - 1)]
    found = cut_by_costs(costs, num_stages, first, last)
    assert sum(found) == len(costs)
    assert min(found) > 0
    assert longest(found) == min(map(longest, ways))


def test_equal_blocks_are_cut_evenly():
    for num_layers, num_stages in ((7, 4), (61, 16), (43, 8), (8, 8)):
        sizes = cut_by_costs([1.0] * num_layers, num_stages)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_stages", "sizes", "line"),
    [
        (4, (2, 2, 2, 2), "cut = (2, 2, 2, 2): must sum to ModelConfig.num_layers = 7, not 8"),
        (4, (7, 0, 0, 0), "cut = (7, 0, 0, 0): must be whole numbers of at least 1: every stage needs a layer"),
        (4, (3, 4), "cut = (3, 4): must be Topology.num_stages = 4 numbers"),
        (8, None, "Topology.num_stages = 8: must be at most ModelConfig.num_layers = 7: every stage needs a layer"),
    ],
)
def test_a_cut_that_does_not_add_up_is_refused(num_stages, sizes, line):
    with pytest.raises(SettingError) as error:
        make_cut((True,) * 7, num_stages, sizes, "cut")
    assert str(error.value) == line
