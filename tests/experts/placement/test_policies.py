"""Properties of every placement policy; add a new policy to POLICIES and it is held to the same."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from swift.errors import SettingError
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.policy import PlacementPolicy, Static
from swift.experts.placement.replicas import replica_counts
from swift.experts.placement.symi import Symi

POLICIES: list[PlacementPolicy] = [Static(), Symi(), MinMax(), Packed(), FlexMoE(1), FlexMoE(3)]
SHAPES = [(1, 1, 1, 1), (2, 5, 3, 4), (1, 5, 5, 1), (2, 16, 16, 4)]  # L, E, N, S
SMALL = SHAPES[1]
MOST_TOKENS = 2**31 - 1

every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
compiled = functools.cache(jax.jit)


def popularities(num_layers: int, num_classes: int) -> dict[str, np.ndarray]:
    """The imbalance patterns that placements are known to be tripped by, int32[L, E] each."""
    rng = np.random.default_rng(0)
    classes = np.arange(num_layers * num_classes).reshape(num_layers, num_classes) % num_classes
    patterns = {
        "even": np.full_like(classes, 100),
        "random": rng.integers(0, 5000, classes.shape),
        "zipf": rng.permuted(100_000 // (classes + 1) ** 2, axis=1),
        "no tokens": np.zeros_like(classes),
        "one token": classes == 0,
        "one hot class": 4096 * (classes == np.arange(num_layers)[:, None] % num_classes),
        "one starved class": 4096 * (classes != num_classes - 1),
        "huge": np.full_like(classes, MOST_TOKENS),
        "huge and tiny": np.where(classes % 2, 1, MOST_TOKENS),
    }
    return {name: pattern.astype(np.int32) for name, pattern in patterns.items()}


def assert_valid(placement_LNS: jax.Array, shape: tuple[int, int, int, int]) -> None:
    num_layers, num_classes, num_ranks, slots_per_rank = shape
    assert placement_LNS.dtype == jnp.int32
    assert placement_LNS.shape == (num_layers, num_ranks, slots_per_rank)
    for placement_NS in np.asarray(placement_LNS):
        assert sorted(set(placement_NS.ravel().tolist())) == list(range(num_classes))
    counts_LE = np.asarray(replica_counts(placement_LNS, num_classes))
    assert (counts_LE.sum(axis=1) == num_ranks * slots_per_rank).all()


@every_policy
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_run_through_all_patterns_stays_valid_and_repeats(policy, shape):
    first, again = policy.init(*shape), policy.init(*shape)
    assert_valid(first[0], shape)
    for name, popularity_LE in popularities(*shape[:2]).items():
        first = compiled(policy)(popularity_LE, *first)
        again = compiled(replace(policy))(popularity_LE, *again)
        assert_valid(first[0], shape)
        jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), first, again)


@every_policy
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_popularity_gives_a_valid_placement(policy, data):
    shape = data.draw(st.sampled_from(SHAPES))
    tokens = st.sampled_from([0, 1, MOST_TOKENS]) | st.integers(0, 50) | st.integers(0, MOST_TOKENS)
    placement_LNS, state = policy.init(*shape)
    for _ in range(3):
        flat = data.draw(st.lists(tokens, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        popularity_LE = np.array(flat, np.int32).reshape(shape[:2])
        placement_LNS, state = compiled(policy)(popularity_LE, placement_LNS, state)
        assert_valid(placement_LNS, shape)


@every_policy
@pytest.mark.parametrize("pattern", ["zipf", pytest.param("one hot class", marks=pytest.mark.long)])
def test_op_by_op_gives_what_jit_gives(policy, pattern):
    popularity_LE = jnp.asarray(popularities(*SMALL[:2])[pattern])
    start = policy.init(*SMALL)
    jitted = compiled(policy)(popularity_LE, *start)
    with jax.disable_jit():
        jax.tree.map(np.testing.assert_array_equal, jitted, policy(popularity_LE, *start))


@every_policy
def test_one_program_serves_all_iterations(policy):
    traces = []

    @jax.jit
    def step(popularity_LE, placement_LNS, state):
        traces.append(policy.name)
        return policy(popularity_LE, placement_LNS, state)

    carry = policy.init(*SMALL)
    for popularity_LE in popularities(*SMALL[:2]).values():
        carry = step(popularity_LE, *carry)
    assert len(traces) == 1


@every_policy
def test_a_layer_does_not_depend_on_the_others(policy):
    placement_LNS, state = policy.init(*SMALL)
    for popularity_LE in popularities(*SMALL[:2]).values():
        together, _ = compiled(policy)(popularity_LE, placement_LNS, state)
        flipped, _ = compiled(policy)(popularity_LE[::-1], placement_LNS, state)
        twice, _ = compiled(policy)(popularity_LE[[0, 0]], placement_LNS, state)
        np.testing.assert_array_equal(flipped[::-1], together)
        np.testing.assert_array_equal(twice[1], together[0])


@every_policy
def test_under_vmap_over_ranks_the_placement_stays_one_for_all(policy):
    local_NLE = np.random.default_rng(1).integers(0, 900, (4, *SMALL[:2])).astype(np.int32)
    start = policy.init(*SMALL)

    def per_rank(popularity_LE):
        return policy(jax.lax.psum(popularity_LE, "expert"), *start)

    # out_axes=None is refused for anything that differs, or might differ, over the axis.
    ranks = jax.jit(jax.vmap(per_rank, axis_name="expert", out_axes=None))
    expected = compiled(policy)(local_NLE.sum(axis=0, dtype=np.int32), *start)
    jax.tree.map(np.testing.assert_array_equal, ranks(local_NLE), expected)


@every_policy
def test_under_shard_map_the_placement_is_replicated(policy):
    devices = np.array(jax.devices())
    local_NLE = np.random.default_rng(2).integers(0, 900, (devices.size, *SMALL[:2])).astype(np.int32)
    start = policy.init(*SMALL)

    def per_rank(popularity_1LE):
        return policy(jax.lax.psum(popularity_1LE[0], "expert"), *start)

    mesh = Mesh(devices, ("expert",))
    ranks = jax.shard_map(per_rank, mesh=mesh, in_specs=PartitionSpec("expert"), out_specs=PartitionSpec())
    expected = compiled(policy)(local_NLE.sum(axis=0, dtype=np.int32), *start)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ranks)(local_NLE), expected)


@every_policy
def test_wide_types_and_strict_promotion_change_nothing(policy):
    popularity_LE = popularities(*SMALL[:2])["zipf"]
    start = jax.tree.map(np.asarray, policy.init(*SMALL))
    expected = compiled(policy)(popularity_LE, *start)
    for wide in (False, True):
        with jax.enable_x64(wide), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            result = jax.jit(policy)(popularity_LE, *policy.init(*SMALL))
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        assert [leaf.dtype for leaf in jax.tree.leaves(result)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]


@every_policy
def test_without_tokens_the_uniform_placement_stays(policy):
    placement_LNS, state = policy.init(*SMALL)
    for _ in range(3):
        moved_LNS, state = compiled(policy)(np.zeros(SMALL[:2], np.int32), placement_LNS, state)
        np.testing.assert_array_equal(moved_LNS, placement_LNS)


@every_policy
def test_a_policy_is_a_value(policy):
    assert replace(policy) == policy
    assert hash(replace(policy)) == hash(policy)
    as_argument = jax.jit(lambda policy, *args: policy(*args), static_argnums=0)
    start = policy.init(1, 3, 2, 2)
    popularity_LE = jnp.array([[5, 1, 1]], jnp.int32)
    jax.tree.map(
        np.testing.assert_array_equal, as_argument(policy, popularity_LE, *start), policy(popularity_LE, *start)
    )


@every_policy
def test_fewer_slots_than_classes_is_a_setting_error(policy):
    with pytest.raises(
        SettingError, match=r"ExpertConfig\.slots_per_rank = 2: at least 3, for each of 9 experts .* 4 expert"
    ):
        policy.init(1, 9, 4, 2)


@pytest.mark.parametrize("policy", [Symi(), MinMax()], ids=lambda policy: policy.name)
def test_contiguous_policies_keep_class_order(policy):
    carry = policy.init(*SMALL)
    for popularity_LE in popularities(*SMALL[:2]).values():
        carry = compiled(policy)(popularity_LE, *carry)
        assert (np.diff(np.asarray(carry[0]).reshape(SMALL[0], -1), axis=1) >= 0).all()


def test_names_for_tables():
    assert [policy.name for policy in POLICIES] == ["static", "symi", "minmax", "packed", "flexmoe(1)", "flexmoe(3)"]


def test_static_never_changes_and_gives_the_first_classes_the_remainder():
    placement_LNS, state = Static().init(*SMALL)
    assert replica_counts(placement_LNS, 5).tolist() == [[3, 3, 2, 2, 2]] * 2
    moved_LNS, _ = Static()(jnp.asarray(popularities(*SMALL[:2])["one hot class"]), placement_LNS, state)
    np.testing.assert_array_equal(moved_LNS, placement_LNS)
