"""Sums over the peers of a stage: what they are, that all peers have the same bits, and where they may stand.

R: rows of the axis ``worker``, N: expert ranks, X: numbers of a leaf.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from swift.mesh.live import live_mesh
from swift.mesh.peer_sum import PeerAllReduce, reduction_for_unequal_groups, tree_levels
from swift.mesh.per_rank import RANKED, SHARED
from swift.topology import Topology

UNEQUAL = ((0, 3, 5), (1, 4), (2,))
SHAPES = [
    (UNEQUAL, 1),
    (((0, 2, 4, 6, 7), (1, 3), (5,)), 1),
    (((0, 2), (1, 3)), 2),
    (((3, 0, 2), (1,)), 2),
    (((0, 1, 2, 3),), 2),
]


def by_rows(function, num_rows, num_ranks=1):
    """A function of one rank's part, over arrays ``[R, N, ...]`` on so many devices."""
    devices = np.array(jax.devices()[: num_rows * num_ranks]).reshape(num_rows, num_ranks)
    spec = PartitionSpec("worker", "expert")
    body = lambda *parts: jax.tree.map(lambda a: a[None, None], function(*jax.tree.map(lambda a: a[0, 0], parts)))  # noqa: E731
    return jax.jit(
        jax.shard_map(body, mesh=Mesh(devices, ("worker", "expert")), in_specs=spec, out_specs=spec, check_vma=False)
    )


def numbers(groups, num_ranks):
    """A tree of floats whose sum depends on the order, and of integers too large for a float32."""
    num_rows = sum(map(len, groups))
    random = np.random.default_rng(num_rows)
    floats_RNX = random.standard_normal((num_rows, num_ranks, 33)).astype(np.float32)
    return {"floats": floats_RNX, "integers": [random.integers(2**25, 2**27, (num_rows, num_ranks), np.int32)]}


def expected(tree, groups):
    """Computes by numpy, in float64 where it is not in integers, the sum of every row's group."""

    def sums(leaf):
        out = leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf.copy()
        for group in groups:
            out[list(group)] = out[list(group)].sum(0, keepdims=True)
        return out

    return jax.tree.map(sums, tree)


@pytest.mark.parametrize(("groups", "num_ranks"), SHAPES)
def test_both_ways_sum_over_peers_to_the_same_bits_on_all(groups, num_ranks):
    tree, num_rows = numbers(groups, num_ranks), sum(map(len, groups))
    both = lambda part: [PeerAllReduce(groups, way)(part) for way in ("grouped", "tree")]  # noqa: E731
    want = expected(tree, groups)
    for got in jax.device_get(by_rows(both, num_rows, num_ranks)(tree)):
        np.testing.assert_allclose(got["floats"], want["floats"], rtol=0, atol=2e-6)
        np.testing.assert_array_equal(got["integers"], want["integers"])
        for group in groups:
            for leaf in jax.tree.leaves(got):
                assert {leaf[row].tobytes() for row in group} == {leaf[group[0]].tobytes()}


@pytest.mark.parametrize("way", ["grouped", "tree"])
def test_ones_that_are_constants_count_the_peers(way):
    count = by_rows(lambda x: x * PeerAllReduce(UNEQUAL, way)(np.ones((), np.float32)), 6)
    np.testing.assert_array_equal(count(np.ones((6, 1), np.float32))[:, 0], [3, 2, 1, 3, 2, 3])


def test_a_group_may_sum_in_a_branch_that_others_do_not_take():
    peer_sum = PeerAllReduce(UNEQUAL, "grouped")
    assert not peer_sum.is_tree

    def sum_if(takes, x):
        return lax.cond(takes, peer_sum, lambda x: -x, x)

    tree, run = numbers(UNEQUAL, 1)["floats"], by_rows(sum_if, 6)
    want = expected(tree, UNEQUAL)
    for group in UNEQUAL:
        takes_R = np.isin(np.arange(6), group)
        np.testing.assert_allclose(
            run(takes_R[:, None], tree), np.where(takes_R[:, None, None], want, -tree), rtol=0, atol=2e-6
        )


@pytest.mark.parametrize(
    ("groups", "way", "grouped", "num_permutations"),
    [
        (UNEQUAL, "tree", False, 4),
        (UNEQUAL, "grouped", True, 0),
        (((0, 2, 4, 6, 7), (1, 3), (5,)), "tree", False, 6),
        (((0, 2), (1, 3)), "tree", True, 0),
        (((0,), (1,), (2,)), "tree", False, 0),
        (((0,), (1,), (2,)), "grouped", False, 0),
    ],
)
def test_the_collectives_of_a_sum(groups, way, grouped, num_permutations):
    num_rows = sum(map(len, groups))
    jaxpr = str(jax.make_jaxpr(by_rows(PeerAllReduce(groups, way), num_rows))(jnp.ones((num_rows, 1, 2))))
    assert ("psum" in jaxpr, "axis_index_groups" in jaxpr) == (grouped, grouped)
    assert jaxpr.count("ppermute") == num_permutations
    assert PeerAllReduce(groups, way).is_tree == (num_permutations > 0)


@pytest.mark.parametrize("size", range(1, 10))
def test_a_tree_reaches_everyone_in_the_logarithm_of_the_size(size):
    levels = tree_levels((tuple(range(10, 10 + size)),))
    assert len(levels) == int(np.ceil(np.log2(size)))
    assert sorted(sender for pairs in levels for sender, _ in pairs) == list(range(11, 10 + size))


def test_alone_a_sum_is_the_identity_even_for_virtual_ranks():
    live = live_mesh(Topology(num_expert_ranks=4), "virtual")
    peer_sum = PeerAllReduce(live.peers, "grouped")
    ranked = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    np.testing.assert_array_equal(live.per_rank(peer_sum, (RANKED,), RANKED)(ranked), ranked)


def test_peers_of_a_mesh_with_a_hole():
    live = live_mesh(Topology(2, 2, 2), "emulated", frozenset({(1, 0)}))
    peer_sum = PeerAllReduce(live.peers, reduction_for_unequal_groups(live.mesh.devices.flat[0].platform))
    run = jax.jit(live.per_rank(lambda *parts: peer_sum(parts), (RANKED, SHARED), (RANKED, SHARED)))
    ranked, shared = np.arange(12, dtype=np.float32).reshape(3, 2, 2), np.array([5, 6, 7], np.int32)
    got_ranked, got_shared = run(ranked, shared)
    np.testing.assert_array_equal(
        got_ranked, ranked[[0, 1, 1]] + ranked[[0, 2, 2]] * np.float32([0, 1, 1])[:, None, None]
    )
    np.testing.assert_array_equal(got_shared, [5, 13, 13])


def test_groups_have_to_cover_the_axis():
    for groups in (((0, 1), (3,)), ((0, 1), (1, 2))):
        with pytest.raises(AssertionError, match="do not cover the axis"):
            PeerAllReduce(groups, "grouped")


def test_a_tree_is_for_platforms_that_are_not_known_to_group():
    assert [reduction_for_unequal_groups(platform) for platform in ("cpu", "gpu", "tpu", "abacus")] == ["grouped"] + [
        "tree"
    ] * 3
