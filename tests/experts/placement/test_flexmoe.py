"""FlexMoE's shifts: when they happen, what they may do to the load, and how few slots they change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax
from swift.experts.placement.replicas import changed_slots

SHAPES = [(2, 8, 4, 3), (2, 5, 5, 1), (2, 16, 16, 4)]  # L, E, N, S
flexmoe, minmax = jax.jit(FlexMoE(interval=1)), jax.jit(MinMax())


def replicas_LE(placement_LNS: jax.Array, num_classes: int) -> np.ndarray:
    flat_LM = np.asarray(placement_LNS).reshape(placement_LNS.shape[0], -1)
    return np.stack([np.bincount(flat_M, minlength=num_classes) for flat_M in flat_LM]).astype(np.float32)


def largest_load_L(popularity_LE: np.ndarray, placement_LNS: jax.Array) -> np.ndarray:
    return (popularity_LE.astype(np.float32) / replicas_LE(placement_LNS, popularity_LE.shape[1])).max(axis=1)


def draw_popularity(data, num_layers: int, num_classes: int) -> np.ndarray:
    tokens = data.draw(st.sampled_from([st.integers(0, 4), st.integers(0, 5000), st.integers(0, 2**31 - 1)]))
    size = num_layers * num_classes
    flat = data.draw(st.lists(tokens, min_size=size, max_size=size))
    return np.array(flat, np.int32).reshape(num_layers, num_classes)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_chain_of_rebalances(data):
    shape = data.draw(st.sampled_from(SHAPES))
    placement_LNS, state = FlexMoE(1).init(*shape)
    for _ in range(4):
        popularity_LE = draw_popularity(data, *shape[:2])
        moved_LNS, state = flexmoe(popularity_LE, placement_LNS, state)

        assert (largest_load_L(popularity_LE, moved_LNS) <= largest_load_L(popularity_LE, placement_LNS)).all()
        optimum_LNS, _ = minmax(popularity_LE, placement_LNS, ())
        np.testing.assert_array_equal(
            largest_load_L(popularity_LE, moved_LNS), largest_load_L(popularity_LE, optimum_LNS)
        )
        gained_LE = replicas_LE(moved_LNS, shape[1]) - replicas_LE(placement_LNS, shape[1])
        assert int(changed_slots(placement_LNS, moved_LNS)) == gained_LE.clip(min=0).sum()

        settled_LNS, _ = flexmoe(popularity_LE, moved_LNS, state)
        np.testing.assert_array_equal(settled_LNS, moved_LNS)
        placement_LNS = moved_LNS


@pytest.mark.parametrize("interval", [1, 2, 5, 10])
def test_moves_at_its_interval_only(interval):
    step = jax.jit(FlexMoE(interval))
    placement_LNS, state = FlexMoE(interval).init(2, 4, 4, 2)
    moved = []
    for iteration in range(1, 21):
        # The hot class repeats every three iterations, and so never does at a rebalance.
        hot_LE = np.where(np.arange(4) == iteration % 3, 100, 1)[None].repeat(2, axis=0).astype(np.int32)
        moved_LNS, state = step(hot_LE, placement_LNS, state)
        if changed_slots(placement_LNS, moved_LNS) > 0:
            moved.append(iteration)
        placement_LNS = moved_LNS
    assert moved == list(range(interval, 21, interval))


def test_the_interval_holds_for_all_layers_together():
    step = jax.jit(FlexMoE(2))
    placement_LNS, state = FlexMoE(2).init(2, 3, 3, 2)
    assert jax.tree.map(jnp.shape, state) == ((),)
    popularity_LE = jnp.array([[1, 90, 9], [40, 30, 30]], jnp.int32)
    for expected in ([0, 0], [2, 0], [0, 0], [0, 0]):
        moved_LNS, state = step(popularity_LE, placement_LNS, state)
        assert (moved_LNS != placement_LNS).sum(axis=(1, 2)).tolist() == expected
        placement_LNS = moved_LNS


def test_each_shift_takes_the_last_slot_of_the_class_that_can_best_spare_it():
    start_LNS = jnp.array([[[2, 0, 1], [1, 2, 0], [0, 1, 2]]], jnp.int32)
    _, state = FlexMoE(1).init(1, 3, 3, 3)
    moved_LNS, _ = flexmoe(jnp.array([[8, 2, 80]], jnp.int32), start_LNS, state)
    # Class 1 gives two (2/2, 2/1 tokens a replica without), then class 0 two (8/2, 8/1); nothing is left to spare.
    assert moved_LNS.tolist() == [[[2, 0, 1], [2, 2, 2], [2, 2, 2]]]


def test_an_interval_below_one_is_a_setting_error():
    with pytest.raises(SettingError, match=r"FlexMoE\.interval = 0: at least 1 iteration"):
        FlexMoE(interval=0)
