"""The look-up in a sharded table against NumPy, which indexes the whole table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from swift.mesh.hlo_collectives import collective_bytes
from swift.mesh.live import live_mesh
from swift.mesh.per_rank import EXPERT_AXIS, RANKED
from swift.models.vocabulary.lookup import (
    NONE,
    Requests,
    add_gradients_of_copies,
    choose_hot_rows,
    distinct,
    fetch_copies,
    max_requests_per_round,
    max_rounds,
    num_hot_rows,
    sharded_lookup,
    sharded_lookup_gradient,
)
from swift.topology import Topology

RANKS, OWN, TOKENS, WIDTH = 4, 6, 15, 3
ROWS = RANKS * OWN

DRAWS = {
    "zipf": lambda random: random.zipf(1.3, (RANKS, TOKENS)) % ROWS,
    "one row": lambda _: np.full((RANKS, TOKENS), ROWS - 1),
    "all of one rank's": lambda random: random.integers(0, OWN, (RANKS, TOKENS)) * RANKS + 2,
    "each rank its own": lambda random: random.integers(0, OWN, (RANKS, TOKENS)) * RANKS + np.arange(RANKS)[:, None],
}


HOT = np.array([[NONE, 3, 23], [0, 1, 2], [NONE, NONE, NONE], [2, 11, 23]], np.int32)
"""Rows that each rank has copies of: ascending, its own among them, and with none."""


def looked_up(num_hot):
    """(rows of the tokens, gradients of the shares and of the copies) of all ranks."""

    def both(own_vD, hot_H, tokens_BT, d_x_BTD):
        hot_H = hot_H[0, :num_hot]
        copies_HD, wire = own_vD[0, :0], d_x_BTD.dtype
        if num_hot:
            copies_HD = fetch_copies(own_vD[0], hot_H, RANKS)
        found = sharded_lookup(own_vD[0], hot_H, copies_HD, tokens_BT, RANKS)
        total_vD, d_copies_HD = sharded_lookup_gradient(d_x_BTD, hot_H, tokens_BT, OWN, RANKS, wire)
        if num_hot:
            total_vD = add_gradients_of_copies(total_vD, d_copies_HD, hot_H, RANKS, wire)
        return found, total_vD[None]

    live = live_mesh(Topology(num_expert_ranks=RANKS), "emulated")
    return jax.jit(live.per_rank(both, (RANKED,) * 4, (RANKED, RANKED)))


def ranked(*of_ranks):
    """Arrays ``[rank, ...]`` as those of one worker's only layer."""
    return tuple(jnp.asarray(one)[None, None] for one in of_ranks)


@pytest.mark.parametrize("num_hot", [0, 3])
def test_rows_and_their_gradient_are_those_of_the_whole_table(num_hot):
    run, random = looked_up(num_hot), np.random.default_rng(0)
    for name, draw in DRAWS.items():
        row_NT = draw(random).astype(np.int32)
        table_VD = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
        d_rows_NTD = random.standard_normal((RANKS, TOKENS, WIDTH)).astype(np.float32)
        shares = np.stack([table_VD[rank::RANKS] for rank in range(RANKS)])
        found, gradient = (np.asarray(one)[0, 0] for one in run(*ranked(shares, HOT, row_NT, d_rows_NTD)))
        np.testing.assert_array_equal(found, table_VD[row_NT], err_msg=name)
        wanted_VD = np.zeros_like(table_VD)
        np.add.at(wanted_VD, row_NT, d_rows_NTD)
        wanted = np.stack([wanted_VD[rank::RANKS] for rank in range(RANKS)])
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def test_copies_are_what_is_looked_up_and_their_gradients_stay():
    """Rank 1 has copies of rows 0 to 2, of its own making; what others get and the owners sum is not of them."""

    def both(own_vD, tokens_BT, d_x_BTD):
        copies_HD = jnp.full((3, WIDTH), 7, jnp.float32)
        hot_H = jnp.asarray(HOT)[lax.axis_index(EXPERT_AXIS)]
        found = sharded_lookup(own_vD[0], hot_H, copies_HD, tokens_BT, RANKS)
        total_vD, d_copies_HD = sharded_lookup_gradient(d_x_BTD, hot_H, tokens_BT, OWN, RANKS, d_x_BTD.dtype)
        return found, total_vD[None], d_copies_HD[None]

    live = live_mesh(Topology(num_expert_ranks=RANKS), "emulated")
    row_NT = np.tile(np.array([0, 1, 1], np.int32), (RANKS, 5))
    zeros = np.zeros((RANKS, OWN, WIDTH), np.float32)
    given = ranked(zeros, row_NT, np.ones((RANKS, TOKENS, WIDTH), np.float32))
    run = jax.jit(live.per_rank(both, (RANKED,) * 3, (RANKED,) * 3))
    found, total, d_copies = (np.asarray(one)[0, 0] for one in run(*given))
    assert found[:, :, 0].tolist() == [[0] * TOKENS, [7] * TOKENS, [0] * TOKENS, [0] * TOKENS]
    assert total[:2, 0, 0].tolist() == [3 * 5, 3 * 10]  # of the three ranks that have no copy
    assert d_copies[:, :, 0].tolist() == [[0, 0, 0], [5, 10, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("num_hot", [0, 3])
def test_gradients_of_a_row_are_summed_wider_than_they_are(num_hot):
    """256 and three times 1, one from each rank: in bfloat16 each sum of two of these would be 256."""
    row_NT = np.full((RANKS, TOKENS), 1, np.int32)
    d_rows_NTD = np.zeros((RANKS, TOKENS, WIDTH), np.float32)
    d_rows_NTD[:, 0] = np.array([256, 1, 1, 1])[:, None]
    shares, d_rows = (jnp.asarray(a, jnp.bfloat16) for a in (np.zeros((RANKS, OWN, WIDTH)), d_rows_NTD))
    _, gradient = looked_up(num_hot)(*ranked(shares, HOT, row_NT, d_rows))
    assert np.asarray(gradient, np.float32)[0, 0, 1, 0].tolist() == [259] * WIDTH


def test_hot_rows_are_those_that_most_micro_batches_need():
    """Against a count by hand, of each iteration's micro-batches; a row of one micro-batch is not hot."""
    random = np.random.default_rng(0)
    for num_hot in (2, 6, ROWS):
        tokens_nT = (random.zipf(1.3, (8, 8)) % ROWS).astype(np.int32)
        iteration_n = np.array([0, -1, 0, 0, 1, 0, -1, 1], np.int32)
        wanted = []
        for iteration in range(2):
            needed = [sum(row in of for of in tokens_nT[iteration_n == iteration]) for row in range(ROWS)]
            most = sorted(range(ROWS), key=lambda row: (-needed[row], row))[:num_hot]
            wanted.append(sorted(row if needed[row] > 1 else NONE for row in most))
        assert choose_hot_rows(tokens_nT, iteration_n, 2, ROWS, num_hot).tolist() == wanted


def test_a_worker_that_embeds_nothing_counts_nothing():
    """It has no hot rows, and counts are only in a branch that it does not take."""

    def choose(iteration_n):
        return choose_hot_rows(np.zeros((4, TOKENS), np.int32), iteration_n, 2, ROWS, 3)

    nowhere = np.full(4, -1, np.int32)
    assert choose(nowhere).tolist() == [[NONE] * 3] * 2
    outside = {equation.primitive.name for equation in jax.make_jaxpr(choose)(nowhere).eqns}
    assert "cond" in outside
    assert not outside & {"scan", "top_k", "sort", "scatter", "scatter-add"}


@pytest.mark.parametrize("buffer_size", [2, 64])
def test_requests_travel_in_rounds_of_any_size(buffer_size):
    """Each rank gets the rows that it wants, and sends one for each: an owner counts the ranks that want a row."""

    def both(own_vD, row_T):
        requests = Requests.of(row_T[0], buffer_size, RANKS)
        none_TD = jnp.zeros((TOKENS, WIDTH), jnp.float32)
        return requests.fetch(own_vD[0], none_TD)[None], requests.add_on_owners(none_TD + 1, 0 * own_vD[0])[None]

    live = live_mesh(Topology(num_expert_ranks=RANKS), "emulated")
    run, random = jax.jit(live.per_rank(both, (RANKED,) * 2, (RANKED,) * 2)), np.random.default_rng(0)
    wanted = np.stack([random.permutation(ROWS)[:TOKENS] for _ in range(RANKS)]).astype(np.int32)
    wanted[1, 4:9], wanted[2] = NONE, NONE
    table_VD = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    shares = np.stack([table_VD[rank::RANKS] for rank in range(RANKS)])
    rows, counts = (np.asarray(one)[0, 0] for one in run(*ranked(shares, wanted)))
    np.testing.assert_array_equal(rows, np.where((wanted == NONE)[..., None], 0, table_VD[wanted]))
    asked = np.bincount(wanted[wanted != NONE], minlength=ROWS)
    np.testing.assert_array_equal(counts[..., 0], [asked[rank::RANKS] for rank in range(RANKS)])


def test_a_row_is_asked_for_once():
    """Each rank has every token of 12 rows, three of each of the 4 ranks', five times: 3 rounds of one request."""
    row_NT = np.tile(np.arange(12, dtype=np.int32), (RANKS, 5))

    def rounds(row_T):
        return Requests.of(distinct(row_T)[0], 1, RANKS).rounds

    assert jax.vmap(rounds, axis_name=EXPERT_AXIS)(row_NT).tolist() == [3] * RANKS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_takes_no_more_memory_than_a_plain_look_up(dtype):
    """An embedding like OLMoE's on 8 ranks of 4,096 tokens, forward and backward: arguments, results, temporaries; with
    copies of hot rows and the sum of their gradients, which the plain one does not have.

    The plain one sends a row and a gradient for each token, in one exchange, whose buffers are as small as can be: they
    have no place to spare, and would drop tokens if these were not spread evenly.
    """
    ranks, own, width, tokens = 8, 50304 // 8, 2048, 4096
    hot = num_hot_rows(tokens, 50304, 4)
    live = live_mesh(Topology(num_expert_ranks=ranks), "emulated")

    def in_shares(own_vD, tokens_BT, d_x_BTD, hot_H, copies_HD, d_copies_HD):
        gradient, more_HD = sharded_lookup_gradient(d_x_BTD, hot_H, tokens_BT, own, ranks, d_x_BTD.dtype)
        x_BTD = sharded_lookup(own_vD, hot_H, copies_HD, tokens_BT, ranks)
        return x_BTD, gradient.astype(own_vD.dtype), d_copies_HD + more_HD

    def exchanged(of_rank):
        by_rank = of_rank.reshape(ranks, -1, *of_rank.shape[1:])
        return lax.all_to_all(by_rank, EXPERT_AXIS, split_axis=0, concat_axis=0).reshape(of_rank.shape)

    def plain(own_vD, tokens_BT, d_x_BTD):
        order_T = jnp.argsort(tokens_BT[0] % ranks)
        asked_T = exchanged(tokens_BT[0, order_T] // ranks)
        x_TD = jnp.zeros_like(d_x_BTD[0]).at[order_T].set(exchanged(own_vD[asked_T]))
        d_own_vD = jnp.zeros_like(own_vD).at[asked_T].add(exchanged(d_x_BTD[0, order_T]))
        return x_TD[None], d_own_vD

    shapes = ((own, width), dtype), ((1, tokens), jnp.int32), ((1, tokens, width), dtype)
    of_copies = ((hot,), jnp.int32), ((hot, width), dtype), ((hot, width), jnp.float32)

    def memory(function, shapes, num_results):
        def per_rank(*of_rank):
            return tuple(result[None] for result in function(*(one[0] for one in of_rank)))

        # A sum is written where it was read, as in a run.
        program = jax.jit(live.per_rank(per_rank, (RANKED,) * len(shapes), (RANKED,) * num_results), donate_argnums=5)
        given = [jax.ShapeDtypeStruct((1, 1, ranks, *shape), dtype) for shape, dtype in shapes]
        sizes = program.lower(*given).compile().memory_analysis()
        counted = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
        return counted - sizes.alias_size_in_bytes

    assert memory(in_shares, (*shapes, *of_copies), 3) <= 1.1 * memory(plain, shapes, 2)


def gradient_alone(wire_dtype):
    """The gradient of all ranks' shares, from tokens and the gradients of their rows; as a run computes it."""

    def gradient(row_T, d_rows_TD):
        return sharded_lookup_gradient(d_rows_TD, jnp.zeros(0, jnp.int32), row_T, OWN, RANKS, wire_dtype)[0][None]

    live = live_mesh(Topology(num_expert_ranks=RANKS), "emulated")
    return jax.jit(live.per_rank(gradient, (RANKED, RANKED), RANKED))


def test_the_gradient_alone_sends_no_rows_to_tokens():
    """Requests and gradients in rounds, these in the dtype that is asked for."""
    shapes = ((1, TOKENS), jnp.int32), ((1, TOKENS, WIDTH), jnp.float32)
    given = [jax.ShapeDtypeStruct((1, 1, RANKS, *shape), dtype) for shape, dtype in shapes]
    for wire_dtype, size in (("float32", 4), ("float16", 2)):
        text = gradient_alone(wire_dtype).lower(*given).compile().as_text()
        assert collective_bytes(text, RANKS)["all-to-all"] == RANKS**2 * (4 + size * WIDTH)


@pytest.mark.parametrize(("wire_dtype", "wanted"), [("float32", 1029), ("bfloat16", 1026)])
def test_gradients_travel_in_the_dtype_of_the_wire(wire_dtype, wanted):
    """Ranks have 257 of two tokens or 258 of three: in bfloat16 257 would be 256, and the sum of all 1,024 or 1,032."""
    row_NT = np.arange(TOKENS, dtype=np.int32) + np.zeros((RANKS, 1), np.int32)
    row_NT[:, 1], d_rows_NTD = row_NT[:, 0], np.zeros((RANKS, TOKENS, WIDTH))
    d_rows_NTD[:, 0], d_rows_NTD[:, 1], d_rows_NTD[0, 2] = 256, 1, 1
    row_NT[0, 2] = row_NT[0, 0]
    d_rows = jnp.asarray(d_rows_NTD, jnp.bfloat16)
    gradient = gradient_alone(wire_dtype)(row_NT[None, None, :, None], d_rows[None, None, :, None])
    assert gradient.dtype == jnp.float32
    assert np.asarray(gradient)[0, 0, 0, 0].tolist() == [wanted] * WIDTH


def test_the_gradient_has_no_matmul():
    """Neither with one-hot tokens nor otherwise: the FLOPs are additions alone."""
    shapes = ((1, 1, RANKS, 1, 512), jnp.int32), ((1, 1, RANKS, 1, 512, 64), jnp.float32)
    lowered = gradient_alone("float32").lower(*(jax.ShapeDtypeStruct(*one) for one in shapes))
    assert "dot_general" not in lowered.as_text()


def test_there_is_room_for_few_hot_rows_and_none_where_no_micro_batch_shares_them():
    """A sixteenth of the tokens, at most the vocabulary; a single micro-batch asks for each row once anyway."""
    assert [num_hot_rows(4096, 50_304, microbatches) for microbatches in (1, 2, 16)] == [0, 256, 256]
    assert (num_hot_rows(10, 256, 2), num_hot_rows(4096, 100, 2)) == (1, 100)


def test_a_buffer_is_small_and_rounds_are_few():
    """64 rounds if all tokens differ, fewer where a rank has fewer rows; a buffer of one where there are few tokens."""
    assert (max_requests_per_round(4096, 8), max_rounds(4096, 50_304, 8)) == (8, 64)
    assert max_rounds(4096, 1024, 8) == 16
    assert (max_requests_per_round(15, 4), max_rounds(15, 24, 4)) == (1, 4)
