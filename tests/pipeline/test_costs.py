"""Costs of chunks for the planner, against FLOPs counted by hand."""

import pytest

from swift.pipeline.step.costs import plan_costs

pytestmark = pytest.mark.usefixtures("x64")


def test_embedding_and_head_are_part_of_the_first_and_the_last_chunk(rig):
    """Chunks of one, two and one dense layers; 2 sequences of 5 tokens, width 8, 2 heads of 4, hidden width 12."""
    one = rig(topology=(2, 2, 1), pattern=(False,) * 4, cut=((3, 1), (1, 3)))
    costs, chunks, _ = plan_costs(one.spec, 2)
    tokens, width, vocabulary = 2 * 5, 8, one.experiment.data.vocab_size
    attention = 2 * tokens * width * 4 * width + 2 * (2 * 2 * 2 * 5 * 5 * 4)
    unit = 2 * (attention + 2 * (2 * tokens * width * 12))  # F of the two layers of the middle chunk
    embedding = 2 * tokens * width * vocabulary
    assert [chunk.num_blocks for chunk in chunks] == [1, 2, 1]
    assert [chunk.f for chunk in chunks] == pytest.approx([1 / 2, 1, 1 / 2 + 3 * embedding / unit])
    assert [chunk.b * costs.t_b for chunk in chunks] == pytest.approx(
        [costs.t_b / 2 + embedding / unit, costs.t_b, costs.t_b / 2]
    )
    assert [chunk.w for chunk in chunks] == pytest.approx([1 / 2, 1, 1 / 2])


def test_an_embedding_in_shares_has_no_matmul_and_counts_as_nothing(rig):
    fields = {"topology": (1, 2, 2), "pattern": (False,) * 2}
    whole, shared = (plan_costs(rig(**fields, embedding=one).spec, 2)[1] for one in ("replicated", "sharded"))
    assert whole[0].b > shared[0].b == 1
    assert whole[1:] == shared[1:]


def test_equal_stages_differ_by_embedding_and_head(rig):
    one = rig(topology=(2, 3, 1), pattern=(False, True))
    _, (first, middle, last), _ = plan_costs(one.spec, 2)
    assert (middle.f, middle.b, middle.w) == (first.f, last.b, last.w) == (1, 1, 1)
    assert last.f > 1 < first.b
    assert plan_costs(rig(topology=(2, 1, 1)).spec, 2)[1] == ()
