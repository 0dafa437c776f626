"""With the best split no token is dropped that any split could serve: a maximum flow is the oracle."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from swift.experts.capacity.balanced_flow import ReplicaMap, balance, shift_overflow
from swift.experts.capacity.rank import admit_tokens
from swift.experts.config import ExpertConfig, RankCapacity
from swift.experts.placement.library import place_experts

pytestmark = pytest.mark.usefixtures("strict_types")

SHAPES = [  # ranks, experts, slots of a rank
    (8, 8, 4),
    (16, 24, 3),
    pytest.param((64, 256, 5), marks=pytest.mark.slow),
]


def most_served(tokens_E, placement_NS, room):
    """Tokens that a split can serve at most: a flow from experts through the ranks that hold them."""
    (num_ranks, _), num_classes = placement_NS.shape, len(tokens_E)
    capacity = np.zeros((2 + num_classes + num_ranks,) * 2, np.int32)
    capacity[0, 2 : 2 + num_classes] = tokens_E
    for rank, classes in enumerate(placement_NS):
        capacity[2 + classes, 2 + num_classes + rank] = tokens_E[classes]
    capacity[2 + num_classes :, 1] = room
    return maximum_flow(csr_array(capacity), 0, 1).flow_value


@jax.jit
def divided(tokens_E, placement_NS, room):
    holders = ReplicaMap.of(placement_NS)
    return shift_overflow(balance(tokens_E, holders), room, holders)


served = jax.jit(admit_tokens, static_argnums=(0, 3))


def draw(shape, seed, skew, drift, tokens):
    """Counts of all sources, and a placement for the load before it drifted."""
    ranks, classes, slots = shape
    random = np.random.default_rng(seed)
    share_E = random.dirichlet(np.full(classes, skew))
    later_E = share_E * random.lognormal(0, drift, classes)
    counts_NE = random.multinomial(tokens, later_E / later_E.sum(), size=ranks)
    return counts_NE.astype(np.int32), place_experts(share_E, ranks, slots)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    skew=st.sampled_from([0.02, 0.3, 3.0]),
    drift=st.sampled_from([0.0, 0.2, 1.0]),
    tokens=st.sampled_from([3, 256, 131_072]),
    factor=st.sampled_from([0.6, 1.0, 1.2]),
)
def test_as_few_tokens_as_possible_are_above_the_room_of_their_rank(shape, seed, skew, drift, tokens, factor):
    counts_NE, placement_NS = draw(shape, seed, skew, drift, tokens)
    tokens_E, room = counts_NE.sum(axis=0), int(factor * tokens)
    tokens_NS = np.asarray(divided(tokens_E.astype(np.int32), placement_NS, room))
    assert tokens_NS.min() >= 0
    np.testing.assert_array_equal(np.bincount(placement_NS.ravel(), tokens_NS.ravel(), len(tokens_E)), tokens_E)
    assert np.minimum(tokens_NS.sum(axis=1), room).sum() == most_served(tokens_E, placement_NS, room)


def test_tokens_above_the_room_go_along_a_chain_of_ranks():
    """Rank r shares expert r with the next one only, and the last one has all the room."""
    ranks = 16
    placement_NS = np.stack([np.arange(ranks), np.maximum(np.arange(ranks) - 1, 0)], axis=1).astype(np.int32)
    tokens_E = np.full(ranks, 10, np.int32)
    tokens_E[0], tokens_E[-1] = 17, 3
    tokens_NS = np.asarray(divided(tokens_E, placement_NS, 10))
    assert most_served(tokens_E, placement_NS, 10) == tokens_E.sum()
    assert tokens_NS.sum(axis=1).tolist() == [10] * ranks


@pytest.mark.parametrize("seed", range(4))
def test_the_layer_drops_no_token_that_a_split_could_serve(seed):
    counts_NE, placement_NS = draw((8, 8, 4), seed, 0.5, 0.5, 256)
    found = served(ExpertConfig(8, 4, capacity=RankCapacity(spare_rounds=None)), counts_NE, placement_NS, 256)
    assert int(found.kept_NDS.sum()) == most_served(counts_NE.sum(axis=0), placement_NS, 256)
    np.testing.assert_array_equal(
        np.asarray(found.kept_NDS).sum(axis=(0, 2)).clip(max=256), found.kept_NDS.sum(axis=(0, 2))
    )
    assert int(found.dropped_NE.sum()) == counts_NE.sum() - int(found.kept_NDS.sum())
    assert not found.overflowed_NE.any()
