"""Which tokens go where, and into which rows, against NumPy that goes through them one by one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from swift.experts.capacity.token_rows import (
    SlotRows,
    TokenRows,
    copy_to_slots,
    repeat_tokens,
    sum_over_slots,
    sum_tokens,
)
from swift.experts.config import Buffers, ExactCapacity, ExpertConfig, RankCapacity, SlotCapacity
from swift.experts.grouped_matmul import Groups

pytestmark = pytest.mark.usefixtures("strict_types")

T, S, BLOCK = 6, 3, 2
BEST = RankCapacity(spare_rounds=None)
RANKS = PartitionSpec("ranks")


def drawn(num_ranks, top_k):
    """Slots of every token, different ones, some of them missing; and rows of every slot, in whole blocks."""
    random = np.random.default_rng(num_ranks)
    order = random.permuted(np.tile(np.arange(num_ranks * S), (num_ranks, T, 1)), axis=2)
    slot_NTK = np.where(random.random((num_ranks, T, top_k)) < 0.2, -1, order[..., :top_k]).astype(np.int32)
    slot_NTK[-1, -1] = -1  # padding
    used = np.array([(slot_NTK == slot).sum() for slot in range(num_ranks * S)]).reshape(num_ranks, S)
    size_NS = -(-used // BLOCK) * BLOCK
    return slot_NTK, (np.cumsum(size_NS, axis=1) - size_NS).astype(np.int32), size_NS.astype(np.int32)


def on_ranks(num_ranks, function, *ranked):
    mesh = Mesh(jax.devices()[:num_ranks], ("ranks",))

    def of_rank(*ranked):
        return jax.tree.map(lambda leaf: leaf[None], function(*(leaf[0] for leaf in ranked)))

    return jax.device_get(jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=RANKS, out_specs=RANKS))(*ranked))


@pytest.mark.parametrize(("num_ranks", "top_k"), [(4, 3), (2, 5), (1, 2)])
def test_every_token_goes_once_to_each_rank_that_has_a_slot_for_it(num_ranks, top_k):
    slot_NTK, start_NS, size_NS = drawn(num_ranks, top_k)
    num_received, num_rows = num_ranks * T, num_ranks * T * top_k
    gates_NTK = np.random.default_rng(1).random(slot_NTK.shape).astype(np.float32)

    def find(slot_TK, gates_TK, start_S, size_S):
        groups = Groups(start_S, size_S)
        sizes = {"num_ranks": num_ranks, "num_received": num_received, "num_rows": num_rows}
        return TokenRows.of(slot_TK, gates_TK, groups, **sizes, axis="ranks")

    rows = on_ranks(num_ranks, find, slot_NTK, gates_NTK, start_NS, size_NS)
    for rank in range(num_ranks):
        goes = {(t, other) for t in range(T) for other in range(num_ranks) if other in slot_NTK[rank, t] // S}
        wanted = np.array([sum(to == other for _, to in goes) for other in range(num_ranks)])
        np.testing.assert_array_equal(rows.counts_NN[0][rank], wanted)
        sent = np.flatnonzero(rows.sent.position_X[rank] >= 0)
        found = {(x // num_ranks, rows.sent.peer_X[rank, x]): rows.sent.position_X[rank, x] for x in sent}
        assert len(sent) == len(goes)
        assert found.keys() == goes
        for other in range(num_ranks):
            assert [found[t, other] for t, to in sorted(goes) if to == other] == list(range(wanted[other]))

        taken = [0] * S
        arrived = [(source, t) for source in range(num_ranks) for t in range(T) if rank in slot_NTK[source, t] // S]
        for y in range(num_received):
            if y >= len(arrived):
                assert rows.received.position_X[rank, y] == -1
                assert (rows.slot_rows.row_YK[rank, y] == num_rows).all()
                continue
            source, t = arrived[y]
            before = sum(one < y and arrived[one][0] == source for one in range(y))
            assert (rows.received.peer_X[rank, y], rows.received.position_X[rank, y]) == (source, before)
            np.testing.assert_array_equal(rows.gates_YK[rank, y], gates_NTK[source, t])
            for k, slot in enumerate(slot_NTK[source, t]):
                row = num_rows
                if slot // S == rank:
                    row = start_NS[rank, slot % S] + taken[slot % S]
                    taken[slot % S] += 1
                    assert rows.slot_rows.copy_P[rank, row] == y * top_k + k
                assert rows.slot_rows.row_YK[rank, y, k] == row


def test_copies_and_sums_have_the_gradients_of_indexing():
    slot_NTK, start_NS, size_NS = drawn(1, 2)
    x, gates = (jnp.asarray(np.random.default_rng(2).standard_normal(s), jnp.float32) for s in ((T, 4), (T, 2)))

    def rows_of(slot_TK, gates_TK, start_S, size_S):
        sizes = {"num_ranks": 1, "num_received": T, "num_rows": 2 * T + 2}
        return TokenRows.of(slot_TK, gates_TK, Groups(start_S, size_S), **sizes, axis="ranks")

    slot_rows = jax.tree.map(
        lambda leaf: jnp.asarray(leaf[0]), on_ranks(1, rows_of, slot_NTK, gates[None], start_NS, size_NS).slot_rows
    )

    def ours(x, gates):
        return jnp.sum(sum_over_slots(jnp.sin(copy_to_slots(x, slot_rows)), gates, slot_rows) ** 2)

    def plain(x, gates):
        copies = jnp.concatenate([x, jnp.zeros((1, 4))])[slot_rows.copy_P // 2]
        done = jnp.concatenate([jnp.sin(copies), jnp.zeros((1, 4))])[slot_rows.row_YK]
        return jnp.sum(jnp.einsum("ykd,yk->yd", done, gates) ** 2)

    for got, wanted in zip(*(jax.grad(function, (0, 1))(x, gates) for function in (ours, plain)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@jax.numpy_dtype_promotion("standard")  # ``promote_types`` refuses to name a wider type otherwise
def test_half_precision_is_summed_in_float32():
    """In bfloat16 256 and 1 are 256, and the ones would be lost."""
    done = jnp.asarray([[256.0], *[[1.0]] * 6, [-256.0]], jnp.bfloat16)
    slot_rows = SlotRows(jnp.arange(8, dtype=jnp.int32)[None], jnp.arange(8, dtype=jnp.int32))
    total, back = jax.vjp(lambda done: sum_over_slots(done, jnp.ones((1, 8), jnp.float32), slot_rows), done)
    assert total.dtype == done.dtype
    assert total.tolist() == [[6.0]]
    assert back(total)[0].tolist() == [[6.0]] * 8
    copies, back = jax.vjp(lambda row: copy_to_slots(row, slot_rows), jnp.ones((1, 1), jnp.bfloat16))
    assert back(done)[0].tolist() == [[6.0]]
    assert copies.dtype == done.dtype


def test_what_returns_is_summed_by_token():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2)), jnp.float32)
    np.testing.assert_allclose(sum_tokens(repeat_tokens(x, 3), 3), 3 * x, rtol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "num_ranks", "capacity", "once", "buffers", "at_once", "travel"),
    [
        (8, 4, BEST, True, Buffers(100, None), 400, 359.955),  # 4 - 4 * 0.75^8; headroom is above all tokens
        (4, 2, replace(BEST, headroom=1.0), True, Buffers(94, 12), 200, 187.5),  # 2 - 2 * 0.5^4
        (8, 8, BEST, False, Buffers(125, 16), 800, 800),
        (8, 4, RankCapacity(), True, Buffers(100, None), 400, 359.955),  # whose limit is 250 pairs
        (8, 4, replace(BEST, factor=0.25), True, Buffers(62, 8), 200, 200),
        (1, 4, BEST, False, Buffers(31, 4), 100, 100),
        (2, 1, ExactCapacity(), True, Buffers(100, None), 100, 100),
    ],
)
def test_rows_of_a_hundred_tokens(top_k, num_ranks, capacity, once, buffers, at_once, travel):
    config = ExpertConfig(64, 16, top_k, capacity)
    shape = config, 100, num_ranks
    assert capacity.deduplicates_tokens(config, num_ranks) == once
    assert capacity.buffers(*shape) == buffers
    assert capacity.rows_sent(*shape) == num_ranks * buffers.first
    assert capacity.rows_sent(*shape, at_once=True) == at_once
    assert capacity.rows_travelling(*shape) == pytest.approx(travel, abs=0.01)


def test_all_rows_of_slots_travel_full_or_empty():
    shape = ExpertConfig(64, 16, top_k=8), 100, 4
    assert SlotCapacity().rows_sent(*shape) == SlotCapacity().rows_travelling(*shape) == 4 * 16 * 13
