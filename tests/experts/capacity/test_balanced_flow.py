"""The balanced flow and its sources: nearly the best that a linear program finds, in whole tokens, none lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import csr_array

from swift.experts.capacity.balanced_flow import ReplicaMap, balance
from swift.experts.capacity.token_split import by_source
from swift.experts.placement.packed import Packed

pytestmark = pytest.mark.usefixtures("strict_types")

LOADS = (
    *("balanced", "hot experts", "spread hot experts", "experts without tokens", "rotating hot spot", "burst"),
    *("Zipf", "Dirichlet", "one expert"),
)
"""Megatron-LM's workloads W0 to W7 but the ragged source, which is of ``SOURCES``, and others that are uneven."""
SHAPES = [  # ranks, experts, slots of a rank
    (8, 8, 4),
    (16, 24, 2),
    pytest.param((8, 64, 10), marks=pytest.mark.slow),
    pytest.param((64, 256, 5), marks=pytest.mark.slow),
    pytest.param((256, 512, 3), marks=pytest.mark.slow),
]
SOURCES = ("ragged", "one hot source", "one source", "one expert a source", "mixed")
"""Megatron-LM's ragged source, and others that have more tokens than the rest, or of other experts."""


def draw_shares(load, random, num_classes, step):
    """The share of each expert in the tokens of a step."""
    number = np.arange(num_classes)
    share_E = {
        "balanced": np.ones(num_classes),
        "hot experts": np.where(number < max(num_classes // 8, 1), 8.0, 1.0),
        "spread hot experts": np.where(number % 8 == 0, 8.0, 1.0),
        "experts without tokens": np.where(number >= num_classes // 2, 1.0, 0.0),
        "rotating hot spot": np.where(number == step % num_classes, num_classes, 1.0),
        "burst": np.where((number < 2) & (step % 3 == 0), num_classes, 1.0),
        "Zipf": random.permutation(1 / (1 + number) ** 1.1),
        "Dirichlet": random.dirichlet(np.full(num_classes, 0.2)),
        "one expert": np.where(number == step % num_classes, 1.0, 0.0),
    }[load]
    return share_E / share_E.sum()


def draw_sources(sources, random, num_ranks, share_E):
    """Tokens of every source rank for each expert."""
    hot, classes = random.integers(num_ranks), len(share_E)
    if sources == "one expert a source":
        return 1024 * np.eye(classes, dtype=int)[random.choice(classes, num_ranks, p=share_E)]
    if sources == "mixed":
        counts_NE = random.multinomial(200, share_E, size=num_ranks)
        counts_NE[hot] *= 50
        counts_NE[hot - 1], counts_NE[hot - 2] = 0, np.eye(classes, dtype=int)[hot % classes] * 4000
        return counts_NE
    tokens_N = {
        "ragged": random.integers(0, 400, num_ranks) * (random.random(num_ranks) < 0.7),
        "one hot source": np.where(np.arange(num_ranks) == hot, 20_000, 200),
        "one source": np.where(np.arange(num_ranks) == hot, 131_072, 0),
    }[sources]
    return np.stack([random.multinomial(tokens, share_E) for tokens in tokens_N])


@jax.jit
def split(counts_NE, placement_NS):
    holders = ReplicaMap.of(placement_NS)
    tokens_NS = balance(jnp.sum(counts_NE, axis=0, dtype=jnp.int32), holders)
    return tokens_NS, by_source(counts_NE, tokens_NS, holders)


packed = jax.jit(lambda load_E, like: Packed()(load_E[None], like, ())[0][0])


def best_largest_load(tokens_E, placement_NS):
    """The smallest possible load of the fullest rank, tokens divisible at will."""
    num_ranks, num_slots = placement_NS.shape
    slots = np.arange(placement_NS.size)
    ones, largest = np.ones(placement_NS.size), np.full(num_ranks, placement_NS.size)
    each_class = csr_array((ones, (placement_NS.ravel(), slots)), (len(tokens_E), placement_NS.size + 1))
    rows, columns = np.r_[slots // num_slots, np.arange(num_ranks)], np.r_[slots, largest]
    below_largest = csr_array((np.r_[ones, -np.ones(num_ranks)], (rows, columns)), (num_ranks, placement_NS.size + 1))
    cost = np.r_[np.zeros(placement_NS.size), 1]
    return linprog(cost, below_largest, np.zeros(num_ranks), each_class, tokens_E, method="highs").fun


def scattered(random, num_ranks, num_classes, num_slots):
    spare = random.integers(0, num_classes, num_ranks * num_slots - num_classes)
    return random.permutation(np.r_[np.arange(num_classes), spare]).astype(np.int32).reshape(num_ranks, num_slots)


def check(counts_NE, placement_NS):
    tokens_NS, split_NM = (np.asarray(leaf) for leaf in split(counts_NE.astype(np.int32), placement_NS))
    class_M, tokens_E = placement_NS.ravel(), counts_NE.sum(axis=0)
    assert tokens_NS.min() >= 0
    np.testing.assert_array_equal(np.bincount(class_M, tokens_NS.ravel(), len(tokens_E)), tokens_E)
    assert split_NM.min() >= 0
    np.testing.assert_array_equal(split_NM.sum(axis=0), tokens_NS.ravel())
    np.testing.assert_array_equal(split_NM @ (class_M[:, None] == np.arange(len(tokens_E))), counts_NE)
    best = best_largest_load(tokens_E, placement_NS)
    assert tokens_NS.sum(axis=1).max() <= 1.001 * best + placement_NS.shape[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("load", LOADS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), tokens=st.sampled_from([32, 1024, 131_072]), drift=st.sampled_from([None, 0.0, 0.3]))
def test_no_rank_has_more_than_the_best_split_gives_it(shape, load, seed, tokens, drift):
    """On placements packed for the load, for the load before it drifted, and on any placement."""
    ranks, classes, slots = shape
    random = np.random.default_rng(seed)
    share_E = draw_shares(load, random, classes, seed)
    if drift is None:
        placement_NS = scattered(random, ranks, classes, slots)
    else:
        before_E = share_E * random.lognormal(0, drift, classes)
        like = np.zeros((1, ranks, slots), np.int32)
        placement_NS = np.asarray(packed((1e6 * before_E).astype(np.int32), like))
    check(random.multinomial(tokens, share_E, size=ranks), placement_NS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kept", ["one", "two", "one in eight"])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16))
def test_experts_without_tokens(shape, kept, seed):
    """Nearly all of them: their slots are of no use, and ranks that have no others stay empty."""
    ranks, classes, slots = shape
    random = np.random.default_rng(seed)
    share_E, number = np.zeros(classes), {"one": 1, "two": 2, "one in eight": max(classes // 8, 3)}[kept]
    share_E[random.choice(classes, number, replace=False)] = random.random(number) + 0.1
    check(random.multinomial(1024, share_E / share_E.sum(), size=ranks), scattered(random, ranks, classes, slots))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sources", SOURCES)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), skew=st.sampled_from([0.1, 1.0]))
def test_sources_that_differ(shape, sources, seed, skew):
    ranks, classes, slots = shape
    random = np.random.default_rng(seed)
    share_E = random.dirichlet(np.full(classes, skew))
    check(draw_sources(sources, random, ranks, share_E), scattered(random, ranks, classes, slots))


def test_a_chain_of_ranks_along_which_all_tokens_have_to_move():
    """Rank r shares an expert with r + 1 only: what one has too much goes through all others."""
    ranks = 16
    placement_NS = np.stack([np.arange(ranks), (np.arange(ranks) + 1) % ranks], axis=1).astype(np.int32)
    counts_NE = np.zeros((ranks, ranks), int)
    counts_NE[:, 0] = 10_000
    counts_NE[:, 1:] = 10
    check(counts_NE, placement_NS)


def test_proportions_of_a_source_are_those_of_the_slots():
    """What a rank gets of an expert comes from all sources alike, within a few tokens."""
    random = np.random.default_rng(0)
    counts_NE = random.multinomial(2048, random.dirichlet(np.ones(8)), size=8)
    placement_NS = scattered(random, 8, 8, 4)
    tokens_NS, split_NM = (np.asarray(leaf) for leaf in split(counts_NE.astype(np.int32), placement_NS))
    class_M = placement_NS.ravel()
    share_NM = counts_NE[:, class_M] * (tokens_NS.ravel() / np.maximum(counts_NE.sum(axis=0)[class_M], 1))
    assert np.abs(split_NM - share_NM).max() <= 4
