"""Slots that follow the routing: an even share for every rank, whatever the load, and as few slots as that takes."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.experts.capacity.exact import assign_slots
from swift.experts.config import ExactCapacity, ExpertConfig

pytestmark = pytest.mark.usefixtures("strict_types")

assign = partial(jax.jit, static_argnums=(1, 2))(assign_slots)
SHAPES = [(8, 8), (9, 8), (3, 4), (25, 8), (1, 5), (7, 1), (64, 16)]  # experts, ranks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_rank_gets_an_even_share_of_any_load(shape, data):
    classes, ranks = shape
    slots = ExactCapacity().least_slots(*shape)
    seed, skew = data.draw(st.integers(0, 2**16)), data.draw(st.sampled_from([0.02, 0.3, 1.0, 100.0]))
    total = data.draw(st.sampled_from([0, 1, ranks - 1, 17 * ranks, 1000 * ranks - 1, 100_000 * ranks]))
    random = np.random.default_rng(seed)
    tokens_E = random.multinomial(total, random.dirichlet(np.full(classes, skew))).astype(np.int32)
    placement_NS, tokens_NS = (np.asarray(leaf) for leaf in assign(tokens_E, ranks, slots))
    assert placement_NS.shape == tokens_NS.shape == (ranks, slots)
    assert ((placement_NS >= 0) & (placement_NS < classes)).all()
    assert (tokens_NS >= 0).all()
    np.testing.assert_array_equal(np.bincount(placement_NS.ravel(), tokens_NS.ravel(), classes), tokens_E)
    assert tokens_NS.sum(axis=1).max() <= -(-total // ranks)


@pytest.mark.parametrize(("classes", "ranks"), SHAPES)
def test_one_slot_fewer_is_refused_in_a_line(classes, ranks):
    exact = ExactCapacity()
    slots = exact.least_slots(classes, ranks)
    exact.check_slots(ExpertConfig(classes, slots), ranks)
    reason = "with" if slots > 1 else "$"  # no settings have no slot at all
    with pytest.raises(SettingError, match=rf"slots_per_rank = {slots - 1}: .*at least {slots} ?{reason}") as error:
        exact.check_slots(ExpertConfig(classes, slots - 1), ranks)
    assert "\n" not in str(error.value)


def test_one_slot_fewer_is_too_few_for_some_load():
    """Three experts with as many tokens each on two ranks: cut at the middle, one of them is on both."""
    assert ExactCapacity().least_slots(3, 2) == 2
    # Of four experts with 1, 1, 1 and 3 tokens the last fills a rank, and three are left.
    assert ExactCapacity().least_slots(4, 2) == 3
