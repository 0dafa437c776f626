"""Tokens served where the slots of a rank share its rows: none twice, none dropped beside free rows."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.experts.capacity.rank import admit_tokens, in_proportion
from swift.experts.capacity.token_split import RowLimits, Slots, split_tokens
from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity, SlotCapacity

pytestmark = pytest.mark.usefixtures("strict_types")

RANKS, SLOTS, CLASSES, TOKENS = 4, 3, 5, 64
CAPACITIES = {
    "spare rounds": RankCapacity(),
    "even, no headroom": RankCapacity(spare_rounds=0, headroom=1),
    "half the rows": RankCapacity(0.5, headroom=2.0),
}
served = jax.jit(admit_tokens, static_argnums=(0, 3))
limited = partial(jax.jit, static_argnums=(1, 2))(in_proportion)


@partial(jax.jit, static_argnames=("rooms", "rounds"))
def wanted(counts_NE, placement_NS, rooms, rounds):
    return split_tokens(counts_NE, placement_NS, Slots.of(placement_NS, CLASSES), rooms, TOKENS, rounds)


def draw(seed, skew):
    random = np.random.default_rng(seed)
    share_E = random.dirichlet(np.full(CLASSES, skew))
    tokens_N = random.integers(TOKENS // 2, TOKENS + 1, RANKS)
    counts_NE = np.stack([random.multinomial(n, share_E) for n in tokens_N]).astype(np.int32)
    spare = random.integers(0, CLASSES, RANKS * SLOTS - CLASSES)
    placement = random.permutation(np.concatenate([np.arange(CLASSES), spare])).astype(np.int32)
    return counts_NE, placement.reshape(RANKS, SLOTS)


@pytest.mark.parametrize("capacity", CAPACITIES.values(), ids=CAPACITIES)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**16), skew=st.sampled_from([0.1, 1.0, 10.0]))
def test_every_pair_is_served_once_or_dropped_for_a_reason(capacity, seed, skew):
    counts_NE, placement_NS = draw(seed, skew)
    experts = ExpertConfig(CLASSES, SLOTS, capacity=capacity)
    kept_NDS, dropped_NE, overflowed_NE = jax.device_get(served(experts, counts_NE, placement_NS, TOKENS))
    shape = experts, TOKENS, RANKS
    room, buffer = capacity.rows_per_rank(*shape), capacity.rows_per_buffer(*shape)
    wanted_NDS = np.asarray(wanted(counts_NE, placement_NS, RowLimits(room, buffer), capacity.spare_rounds)).reshape(
        kept_NDS.shape
    )

    is_class_DSE = placement_NS[..., None] == np.arange(CLASSES)
    np.testing.assert_array_equal(np.einsum("nds,dse->ne", kept_NDS, is_class_DSE) + dropped_NE, counts_NE)
    assert (kept_NDS >= 0).all()
    assert (kept_NDS <= wanted_NDS).all()
    assert (kept_NDS.sum(axis=2) <= buffer).all()
    assert (kept_NDS.sum(axis=(0, 2)) <= room).all()
    assert (overflowed_NE >= 0).all()
    assert (overflowed_NE <= dropped_NE).all()
    # Nothing is lost to rounding: what is full is full to the last row.
    is_full_ND = wanted_NDS.sum(axis=2) > buffer
    sent_ND = np.minimum(wanted_NDS.sum(axis=2), buffer)
    np.testing.assert_array_equal(kept_NDS.sum(axis=(0, 2)), np.minimum(sent_ND.sum(axis=0), room))
    has_room_D = sent_ND.sum(axis=0) <= room
    np.testing.assert_array_equal(kept_NDS.sum(axis=2)[:, has_room_D], sent_ND[:, has_room_D])
    assert is_full_ND.any() or not overflowed_NE.any()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 300), min_size=6, max_size=6), st.sampled_from([(1, 1), (100, 1), (700, 2**19)]))
def test_what_is_over_the_room_is_cut_in_proportion_and_fills_it(numbers, room_and_scale):
    room, scale = room_and_scale
    wanted_X = np.array(numbers, np.int32) * scale
    kept_X = np.asarray(limited(wanted_X[None], room * scale, 2000 * scale))[0]
    if sum(numbers) <= room:
        np.testing.assert_array_equal(kept_X, wanted_X)
    else:
        assert kept_X.sum() == room * scale
        assert (kept_X <= wanted_X).all()
        np.testing.assert_allclose(kept_X, wanted_X * (room / sum(numbers)), atol=1.1)


@pytest.mark.parametrize(
    ("factor", "headroom", "tokens", "ranks", "top_k", "room", "buffer"),
    [
        (1.0, 1.25, 256, 8, 1, 256, 40),
        (1.1, 1.25, 100, 10, 1, 110, 13),
        (1.0, 1.0, 7, 3, 2, 14, 5),
        (1.0, 1.25, 2, 8, 1, 2, 1),
        (None, 1.25, 7, 3, 2, 42, 14),
    ],
)
def test_rows_of_a_rank_and_of_a_buffer(factor, headroom, tokens, ranks, top_k, room, buffer):
    capacity, shape = RankCapacity(factor, headroom=headroom), (ExpertConfig(10, 4, top_k), tokens, ranks)
    assert (capacity.rows_per_rank(*shape), capacity.rows_per_buffer(*shape)) == (room, buffer)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ExpertConfig, {"capacity": "rank"}, r"ExpertConfig\.capacity = 'rank': must be @SlotCapacity\(\) or @RankC"),
        (SlotCapacity, {"factor": 0}, r"SlotCapacity\.factor = 0: must be a number above 0"),
        (RankCapacity, {"factor": -1}, r"RankCapacity\.factor = -1: must be a number above 0"),
        (RankCapacity, {"spare_rounds": -1}, r"RankCapacity\.spare_rounds = -1: must be a whole number of at least 0"),
        (RankCapacity, {"headroom": 0.9}, r"RankCapacity\.headroom = 0\.9: must be a number of at least 1"),
        (ExactCapacity, {"headroom": 0.9}, r"ExactCapacity\.headroom = 0\.9: must be a number of at least 1"),
    ],
)
def test_settings_that_cannot_work(kind, settings, message):
    with pytest.raises(SettingError, match=message):
        kind(**settings)
