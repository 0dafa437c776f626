"""The expert-parallel layer on the imbalance patterns that break balancers, and its drop rule by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.capacity.slot import Pairs, assign_rows, send, take_rows
from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity, SlotCapacity
from swift.experts.layer import expert_parallel_moe
from swift.experts.reference import reference_moe
from swift.mesh.live import live_mesh
from swift.mesh.per_rank import RANKED, SHARED
from swift.topology import Topology

pytestmark = pytest.mark.usefixtures("strict_types")

RANKS, TOKENS, CLASSES, DIM = 4, 12, 6, 8


@functools.partial(jax.jit, static_argnums=(2, 4))  # op by op, ten times as much would be compiled
def assigned(choices, placement, rows_per_slot, valid, num_classes):
    pairs = Pairs.of(choices, valid, num_classes)
    return pairs, *assign_rows(pairs, placement, rows_per_slot)


def assign(choices, placement, rows_per_slot, valid=None, num_classes=3):
    choices = np.asarray(choices, np.int32)
    valid = np.ones(choices.shape[0], bool) if valid is None else np.asarray(valid)
    return assigned(choices, np.asarray(placement, np.int32), rows_per_slot, valid, num_classes)


def test_pairs_go_round_the_replicas_in_token_order_until_the_class_is_full():
    # Class 1 has slots 0 and 3 of [1, 0, 2, 1], with 2 rows each: its first 4 tokens of 5 are kept.
    pairs, dispatch, dropped = assign([[1], [1], [0], [1], [1], [1]], [[1, 0], [2, 1]], rows_per_slot=2)
    assert dispatch.row_of_pair_A.tolist() == [0, 6, 2, 1, 7, 8]
    assert pairs.popularity_E.tolist() == [1, 5, 0]
    assert dropped.tolist() == [0, 1, 0]
    assert dispatch.pair_of_row_R.tolist() == [0, 3, 2, 6, 6, 6, 1, 4]


def test_padding_takes_no_room_and_is_not_counted():
    pairs, dispatch, dropped = assign([[1], [1], [1]], [[0, 1, 2]], rows_per_slot=1, valid=[False, True, True])
    assert dispatch.row_of_pair_A.tolist() == [3, 1, 3]
    assert pairs.popularity_E.tolist() == [0, 2, 0]
    assert dropped.tolist() == [0, 1, 0]


def test_choices_of_a_token_come_in_order():
    _, dispatch, _ = assign([[2, 0], [0, 2]], [[0, 1, 2]], rows_per_slot=1)
    assert dispatch.row_of_pair_A.tolist() == [2, 0, 3, 3]


def test_a_slot_without_a_class_serves_nobody():
    _, dispatch, dropped = assign([[0], [1], [2], [1]], [[-1, 1], [2, 0]], rows_per_slot=1)
    assert dispatch.row_of_pair_A.tolist() == [3, 1, 2, 4]
    assert dropped.tolist() == [0, 1, 0]


def check_drops(data):
    """No row is given twice, and every drop was necessary."""
    num_tokens, top_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    num_classes = data.draw(st.integers(top_k, 5))
    rows, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(num_classes, num_classes + 4))
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    choices = np.stack([random.permutation(num_classes)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    spare = random.integers(0, num_classes, slots - num_classes)
    placement = random.permutation(np.concatenate([np.arange(num_classes), spare])).astype(np.int32)
    valid = random.random(num_tokens) < 0.8
    pairs, dispatch, dropped = assign(choices, placement[None], rows, valid, num_classes)

    row_of, pair_of = np.asarray(dispatch.row_of_pair_A), np.asarray(dispatch.pair_of_row_R)
    kept = np.flatnonzero(row_of < slots * rows)
    assert len(set(row_of[kept])) == len(kept)
    assert (pair_of[row_of[kept]] == kept).all()
    assert (np.delete(pair_of, row_of[kept]) == choices.size).all()
    assert (placement[row_of[kept] // rows] == choices.reshape(-1)[kept]).all()
    wanted = np.bincount(choices[valid].reshape(-1), minlength=num_classes)
    room = np.bincount(placement, minlength=num_classes) * rows
    np.testing.assert_array_equal(pairs.popularity_E, wanted)
    np.testing.assert_array_equal(dropped, np.maximum(wanted - room, 0))
    assert len(kept) + dropped.sum() == wanted.sum()


@settings(max_examples=8, deadline=None)  # every shape is compiled
@given(st.data())
def test_no_row_is_given_twice_and_every_drop_was_necessary(data):
    check_drops(data)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_of_many_rows_none_is_given_twice(data):
    check_drops(data)


def test_taking_rows_has_the_gradient_of_indexing():
    _, dispatch, _ = assign([[1, 0], [2, 1], [1, 2]], [[0, 1, 2]], rows_per_slot=1)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), jnp.float32)
    weights = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)

    def plain(x):
        padded = jnp.concatenate([jnp.repeat(x, 2, axis=0), jnp.zeros((1, 4), x.dtype)])
        return jnp.sum(padded[dispatch.pair_of_row_R] * weights)

    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(send(x, dispatch, 2) * weights))(x), jax.grad(plain)(x), rtol=1e-6
    )
    assert take_rows(jnp.asarray(x), jnp.array([2, 9]), jnp.array([9, 9, 0])).tolist() == [x[2].tolist(), [0.0] * 4]


def pattern_logits(name, step, random, num_classes=CLASSES):
    logits = random.standard_normal((RANKS, TOKENS, num_classes)).astype(np.float32)
    hot = {
        "one hot expert": np.s_[:, :, 0],
        "a hot rank": np.s_[0, :, 0],
        "rotating hot spot": np.s_[:, :, step % num_classes],
        "burst": np.s_[:, : TOKENS if step == 2 else 0, 1],
        "even": np.s_[:, :0, 0],
    }
    if name in hot:
        logits[hot[name]] += 20
    if name == "a router that has collapsed":
        logits[:] = 0
    if name == "an idle expert":
        logits[:, :, 3] -= 20
    return logits


PATTERNS = [
    *("even", "one hot expert", "a hot rank", "rotating hot spot", "burst", "an idle expert", "no tokens"),
    *("one token", "a router that has collapsed"),
]
BEST = RankCapacity(spare_rounds=None)
MANY = 8
"""Classes where a token has several experts on each rank."""
WEIGHTS = np.random.default_rng(0).standard_normal((MANY, DIM, DIM)).astype(np.float32)


def layer(config):
    """(the layer on all ranks, the oracle) -> (y, gradient with respect to input and logits, load)."""

    def joined(gradients):
        return jnp.concatenate(gradients, axis=-1)

    def loss(x, logits, valid, run):
        y, aux, load = run(logits, x, valid)
        return jnp.sum(y * y) + aux, (y, load)

    def per_rank(logits, x, valid, placement):
        def run(logits, x, valid):
            def fetch(placement):
                here = jnp.take(placement, jax.lax.axis_index("expert"), axis=0)
                return lambda rows, matmul: matmul(rows, jnp.asarray(WEIGHTS)[here])

            apply = fetch if config.capacity.fetches_weights else fetch(placement)
            return expert_parallel_moe(config, logits, x, valid, placement, apply)

        gradient, (y, load) = jax.grad(loss, (0, 1), has_aux=True)(x[0], logits[0], valid[0], run)
        return y[None], joined(gradient)[None], jax.tree.map(lambda leaf: jax.lax.psum(leaf, "expert"), load)

    def plain(logits, x, valid, placement):
        def run(logits, x, valid):
            apply = lambda x: jnp.einsum("td,edf->etf", x, WEIGHTS[: config.num_classes])  # noqa: E731
            return reference_moe(config, logits, x, valid, placement, RANKS, apply)

        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])  # noqa: E731
        gradient, (y, load) = jax.grad(loss, (0, 1), has_aux=True)(flat(x), flat(logits), flat(valid), run)
        return y.reshape(x.shape), joined(gradient).reshape(*x.shape[:2], -1), load

    live = live_mesh(Topology(num_expert_ranks=RANKS), "emulated")
    parallel = jax.jit(live.per_rank(per_rank, (RANKED, RANKED, RANKED, SHARED), (RANKED, RANKED, SHARED)))
    return parallel, jax.jit(plain)


@pytest.mark.parametrize("slots", [2, 5], ids=["more classes than slots per rank", "spare slots"])
@pytest.mark.parametrize("capacity", [SlotCapacity(), RankCapacity()], ids=["slot", "rank"])
def test_imbalance_patterns_conserve_tokens_and_equal_the_oracle(slots, capacity):
    check_patterns(ExpertConfig(CLASSES, slots, top_k=1, aux_loss_coefficient=0.1, capacity=capacity))


@pytest.mark.parametrize("capacity", [ExactCapacity(), BEST], ids=str)
def test_what_is_split_or_assigned_exactly_equals_the_oracle(capacity):
    """In several rounds of the exchange, where a rank is hot."""
    check_patterns(ExpertConfig(CLASSES, 3, top_k=1, aux_loss_coefficient=0.1, capacity=capacity))


ONCE = {
    "exact": ExactCapacity(headroom=1.0),
    "the best split": RankCapacity(0.5, spare_rounds=None),
    "rounds of splitting": RankCapacity(),
    "room for all": RankCapacity(factor=None),
}
ONCE_CASES = [pytest.param(kind, id=name, marks=[pytest.mark.long] * (name != "exact")) for name, kind in ONCE.items()]


@pytest.mark.parametrize("capacity", ONCE_CASES)
def test_tokens_that_go_to_a_rank_once_equal_the_oracle(capacity):
    check_patterns(once(capacity))


@pytest.mark.long
@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("capacity", [ONCE["exact"], ONCE["the best split"]], ids=["exact", "the best split"])
def test_tokens_that_go_to_a_rank_once_and_all_at_once_equal_the_oracle(capacity):
    check_patterns(once(capacity))


def once(capacity):
    """Six of eight experts for a token, on four ranks; some choices of a token may be dropped."""
    config = ExpertConfig(MANY, 3, top_k=6, aux_loss_coefficient=0.1, capacity=capacity)
    assert capacity.deduplicates_tokens(config, RANKS)
    return config


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("capacity", [ExactCapacity(), RankCapacity(), BEST], ids=str)
def test_rows_that_go_all_at_once_equal_the_oracle(capacity):
    """As on TPU and GPU: what is dropped, the outputs and the gradients are those of the rounds."""
    check_patterns(ExpertConfig(CLASSES, 3, top_k=1, aux_loss_coefficient=0.1, capacity=capacity))


@pytest.mark.parametrize(
    "more",
    [
        *({"capacity": capacity} for capacity in (SlotCapacity(), RankCapacity(), BEST, ExactCapacity())),
        {"capacity": ExactCapacity(), "top_k": 6, "num_classes": MANY},
    ],
    ids=str,
)
def test_a_token_whose_logits_are_no_numbers_spoils_its_own_output_alone(more):
    config = ExpertConfig(**{"num_classes": CLASSES, "slots_per_rank": 3} | more)
    parallel, _ = layer(config)
    random = np.random.default_rng(0)
    logits = pattern_logits("even", 0, random, config.num_classes)
    x = random.standard_normal((RANKS, TOKENS, DIM)).astype(np.float32)
    logits[1, 3] = np.nan
    placement = (np.arange(RANKS * 3) % config.num_classes).astype(np.int32).reshape(RANKS, 3)
    ranked = [leaf[None, None] for leaf in (logits, x, np.ones((RANKS, TOKENS), bool))]
    y, gradient, load = jax.tree.map(lambda leaf: leaf[0], jax.device_get(parallel(*ranked, placement[None])))
    assert load.popularity_E.sum() == RANKS * TOKENS * config.top_k
    assert np.isnan(y[0, 1, 3]).all()
    others = np.ones((RANKS, TOKENS), bool)
    others[1, 3] = False
    assert np.isfinite(y[0][others]).all()
    assert np.isfinite(gradient[0][others]).all()


@pytest.mark.parametrize("capacity", [BEST, ExactCapacity()], ids=str)
def test_a_router_without_a_number_spoils_all_outputs_and_loses_no_count(capacity):
    parallel, _ = layer(ExpertConfig(CLASSES, 3, top_k=1, capacity=capacity))
    x = np.random.default_rng(0).standard_normal((RANKS, TOKENS, DIM)).astype(np.float32)
    logits, valid = np.full((RANKS, TOKENS, CLASSES), np.nan, np.float32), np.ones((RANKS, TOKENS), bool)
    placement = (np.arange(RANKS * 3) % CLASSES).astype(np.int32).reshape(RANKS, 3)
    y, _, load = jax.device_get(parallel(*(leaf[None, None] for leaf in (logits, x, valid)), placement[None]))
    assert np.isnan(y).all()
    assert load.popularity_E.sum() == RANKS * TOKENS


def check_patterns(config):
    """The layer on all patterns against the oracle."""
    slots, classes, (parallel, plain) = config.slots_per_rank, config.num_classes, layer(config)
    random = np.random.default_rng(5)
    for name in PATTERNS:
        for step in range(3):
            logits = pattern_logits(name, step, random, classes)
            x = random.standard_normal((RANKS, TOKENS, DIM))
            x, valid = x.astype(np.float32), np.full((RANKS, TOKENS), name not in ("no tokens", "one token"))
            valid[0, 0] |= name == "one token"
            spare = random.integers(0, classes, RANKS * slots - classes)
            placement = random.permutation(np.concatenate([np.arange(classes), spare])).astype(np.int32)
            placement = placement.reshape(RANKS, slots)
            ranked = [leaf[None, None] for leaf in (logits, x, valid)]
            y, gradient, load = jax.tree.map(lambda leaf: leaf[0], jax.device_get(parallel(*ranked, placement[None])))
            expected_y, expected_gradient, expected = plain(logits, x, valid, placement)
            np.testing.assert_array_equal(load.popularity_E, expected.popularity_E, err_msg=name)
            np.testing.assert_array_equal(load.dropped_E, expected.dropped_E, err_msg=name)
            np.testing.assert_array_equal(load.overflowed_E, expected.overflowed_E, err_msg=name)
            assert load.popularity_E.sum() == config.top_k * valid.sum()
            assert np.isfinite(y).all(), name
            assert np.isfinite(gradient).all(), name
            np.testing.assert_allclose(y[0], expected_y, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(gradient[0], expected_gradient, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("factor", "tokens", "slots", "ranks", "top_k", "rows"),
    [
        (1.0, 256, 4, 8, 1, 8),
        (1.1, 100, 1, 10, 1, 11),
        (1.25, 100, 2, 5, 2, 25),
        (0.3, 10, 1, 3, 1, 1),
        (None, 7, 1, 3, 1, 7),
    ],
)
def test_rows_of_a_slot_are_the_exact_ceiling_of_its_share(factor, tokens, slots, ranks, top_k, rows):
    assert SlotCapacity(factor).rows_per_slot(ExpertConfig(10, slots, top_k), tokens, ranks) == rows
