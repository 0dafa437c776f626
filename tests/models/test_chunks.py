"""Chunks: what remains whole in all cuts, and the rows in which each worker has it."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swift.models.cuts import Chunks
from swift.schedules.problem import common_chunks


@st.composite
def draw_chunks(draw):
    """Chunks of pipelines with different cuts, or of workers that hold blocks from anywhere in the model."""
    num_stages, num_pipelines = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_blocks = num_stages + draw(st.integers(0, 4))
    moe_layers = tuple(draw(st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks)))
    if draw(st.booleans()):
        ends = st.permutations(range(1, num_blocks)).map(lambda some: sorted(some[: num_stages - 1]))
        cuts = [np.diff([0, *draw(ends), num_blocks]).tolist() for _ in range(num_pipelines)]
        return Chunks(moe_layers, *common_chunks(cuts))
    more = num_blocks - num_stages
    others = st.lists(st.integers(0, num_stages - 1), min_size=more, max_size=more)
    stages = [draw(st.permutations([*range(num_stages), *draw(others)])) for _ in range(num_pipelines)]
    return Chunks(moe_layers, (1,) * num_blocks, tuple(map(tuple, stages)))


@given(draw_chunks())
def test_every_worker_has_its_blocks_in_rows_of_their_kind(chunks):
    ends, longest = [0, *itertools.accumulate(chunks.sizes)], dict.fromkeys((None, False, True), 0)
    for d, stage_C in enumerate(chunks.stage_DC):
        for p in range(chunks.num_stages):
            holding = chunks.holding(d, p)
            mine = [chunk for chunk, stage in enumerate(stage_C) if stage == p]
            assert np.flatnonzero(chunks.holds_HC[holding]).tolist() == mine
            for is_moe in (None, False, True):
                blocks = [b for b, kind in enumerate(chunks.moe_layers) if is_moe is None or kind == is_moe]
                held = [b for chunk in mine for b in range(ends[chunk], ends[chunk + 1]) if b in blocks]
                longest[is_moe] = max(longest[is_moe], len(held))
                rows = chunks.model_index(is_moe)[holding]
                assert [blocks[number] for number in rows[rows >= 0]] == held
                for chunk in mine:
                    first = chunks.first_layers(is_moe)[holding, chunk]
                    own = [b for b in range(ends[chunk], ends[chunk + 1]) if b in blocks]
                    assert held[first : first + len(own)] == own
    assert {is_moe: chunks.stack_size(is_moe) for is_moe in longest} == longest  # no row more than is needed


@given(draw_chunks())
def test_the_blocks_of_an_op_are_those_of_its_chunk(chunks):
    ops, ends = chunks.ops, [0, *itertools.accumulate(chunks.sizes)]
    for chunk, (begin, end) in enumerate(itertools.pairwise(ends)):
        kinds = list(chunks.moe_layers[begin:end])
        assert ops.is_moe_PB[chunk, : end - begin].tolist() == kinds
        assert ops.stack_index_PB[chunk, : end - begin].tolist() == [
            kinds[:i].count(kind) for i, kind in enumerate(kinds)
        ]


def test_pipelines_cut_alike_have_stages_as_chunks():
    chunks = Chunks((True,) * 5, *common_chunks([(3, 2)] * 3))
    assert chunks.matches_stages
    assert chunks.worker_chunks == ((0,), (1,))
