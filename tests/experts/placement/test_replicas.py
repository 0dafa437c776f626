"""The helpers around replica counts, each against a plain numpy or Python equivalent."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.placement.replicas import changed_slots, contiguous, load_imbalance, replica_counts, total_tokens


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=24, max_size=24))
def test_replica_counts_is_bincount_in_any_order(flat):
    placement_LNS = np.array(flat, np.int32).reshape(2, 4, 3)
    expected_LE = [np.bincount(placement_NS.ravel(), minlength=6) for placement_NS in placement_LNS]
    counts_LE = replica_counts(jnp.asarray(placement_LNS), 6)
    assert counts_LE.dtype == jnp.int32
    np.testing.assert_array_equal(counts_LE, expected_LE)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_contiguous_is_repeat_and_undone_by_replica_counts(classes):
    counts_E = np.bincount(classes, minlength=5).astype(np.int32)
    placement_NS = contiguous(jnp.asarray(counts_E), 4, 3)
    assert placement_NS.dtype == jnp.int32
    np.testing.assert_array_equal(placement_NS, np.repeat(np.arange(5), counts_E).reshape(4, 3))
    np.testing.assert_array_equal(replica_counts(placement_NS[None], 5)[0], counts_E)


def test_changed_slots_counts_all_layers():
    old_LNS = jnp.zeros((2, 2, 3), jnp.int32)
    new_LNS = old_LNS.at[0, 1, 2].set(1).at[1, :, 0].set(4)
    changed = changed_slots(old_LNS, new_LNS)
    assert (changed.dtype, changed.shape, int(changed)) == (jnp.int32, (), 3)
    assert int(changed_slots(old_LNS, old_LNS)) == 0


@pytest.mark.parametrize(
    ("popularity_E", "replicas_E", "expected"),
    [
        ([4, 4, 4], [1, 1, 1], 1.0),
        ([6, 2, 4], [3, 1, 2], 1.0),
        ([12, 0, 0], [1, 1, 1], 3.0),
        ([12, 0, 0], [4, 1, 1], 1.5),
        ([0, 0, 0], [2, 2, 2], 1.0),
        ([2**31 - 1] * 3, [1, 2, 1], 4 / 3),
    ],
)
def test_load_imbalance_by_hand(popularity_E, replicas_E, expected):
    imbalance_L = load_imbalance(jnp.array([popularity_E], jnp.int32), jnp.array([replicas_E], jnp.int32))
    assert imbalance_L.dtype == jnp.float32
    np.testing.assert_allclose(imbalance_L, [expected], rtol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=64, max_size=64))
def test_total_tokens_is_the_exact_sum_rounded_once(popularity):
    assert total_tokens(jnp.array(popularity, jnp.int32)) == np.float32(sum(popularity))
