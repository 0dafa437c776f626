"""The look-up in shares against NumPy, which indexes the whole table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from swift.mesh import EXPERT_AXIS, RANKED, collective_bytes, live_mesh
from swift.models.vocabulary import (
    gradient_in_shares,
    hot_rows,
    look_up_in_shares,
    look_up_rows,
    requests_at_once,
    rounds_if_different,
)
from swift.models.vocabulary.row_look_up import _Requests, distinct
from swift.topology import Topology

RANKS, OWN, TOKENS, WIDTH = 4, 6, 15, 3
ROWS = RANKS * OWN

DRAWS = {
    "zipf": lambda random: random.zipf(1.3, (RANKS, TOKENS)) % ROWS,
    "one row": lambda _: np.full((RANKS, TOKENS), ROWS - 1),
    "all of one rank's": lambda random: random.integers(0, OWN, (RANKS, TOKENS)) * RANKS + 2,
    "each rank its own": lambda random: random.integers(0, OWN, (RANKS, TOKENS)) * RANKS + np.arange(RANKS)[:, None],
}


def looked_up(num_hot, buffer_size):
    """(rows of the tokens, gradient of the shares) of all ranks."""

    def rows(own_vD, row_T):
        return look_up_rows(own_vD, hot_rows(own_vD, num_hot, RANKS), row_T, buffer_size, RANKS)

    def both(own_vD, row_T, d_rows_TD):
        found, pull_back = jax.vjp(lambda own: rows(own, row_T[0]), own_vD[0])
        return found[None], pull_back(d_rows_TD[0])[0][None]

    live = live_mesh(Topology(num_expert_ranks=RANKS), "emulated")
    return jax.jit(live.per_rank(both, (RANKED, RANKED, RANKED), (RANKED, RANKED)))


@pytest.mark.parametrize(("num_hot", "buffer_size"), [(0, 2), (0, 64), (8, 2)])
def test_rows_and_their_gradient_are_those_of_the_whole_table(num_hot, buffer_size):
    run, random = looked_up(num_hot, buffer_size), np.random.default_rng(0)
    for name, draw in DRAWS.items():
        row_NT = draw(random).astype(np.int32)
        table_VD = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
        d_rows_NTD = random.standard_normal((RANKS, TOKENS, WIDTH)).astype(np.float32)
        shares = np.stack([table_VD[rank::RANKS] for rank in range(RANKS)])
        found, gradient = (np.asarray(one)[0, 0] for one in run(*(a[None, None] for a in (shares, row_NT, d_rows_NTD))))
        np.testing.assert_array_equal(found, table_VD[row_NT], err_msg=name)
        wanted_VD = np.zeros_like(table_VD)
        np.add.at(wanted_VD, row_NT, d_rows_NTD)
        wanted = np.stack([wanted_VD[rank::RANKS] for rank in range(RANKS)])
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("num_hot", [0, 8])
def test_gradients_of_a_row_are_summed_wider_than_they_are(num_hot):
    """256 and three times 1, one from each rank: in bfloat16 each sum of two of these would be 256."""
    row_NT = np.full((RANKS, TOKENS), 1, np.int32)
    d_rows_NTD = np.zeros((RANKS, TOKENS, WIDTH), np.float32)
    d_rows_NTD[:, 0] = np.array([256, 1, 1, 1])[:, None]
    shares, d_rows = (jnp.asarray(a, jnp.bfloat16) for a in (np.zeros((RANKS, OWN, WIDTH)), d_rows_NTD))
    _, gradient = looked_up(num_hot, 2)(*(a[None, None] for a in (shares, row_NT, d_rows)))
    assert np.asarray(gradient, np.float32)[0, 0, 1, 0].tolist() == [260] * WIDTH


def test_a_row_is_asked_for_once():
    """Each rank has every token of 12 rows, three of each of the 4 ranks', five times: 3 rounds of one request."""
    row_NT = np.tile(np.arange(12, dtype=np.int32), (RANKS, 5))

    def rounds(row_T):
        return _Requests.of(distinct(row_T)[0], 1, RANKS).rounds

    assert jax.vmap(rounds, axis_name=EXPERT_AXIS)(row_NT).tolist() == [3] * RANKS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_takes_no_more_memory_than_a_plain_look_up(dtype):
    """An embedding like OLMoE's on 8 ranks of 4,096 tokens, forward and backward: arguments, results, temporaries.

    The plain one sends a row and a gradient for each token, in one exchange, whose buffers are as small as can be: they
    have no place to spare, and would drop tokens if these were not spread evenly.
    """
    ranks, own, width, tokens = 8, 50304 // 8, 2048, 4096
    live = live_mesh(Topology(num_expert_ranks=ranks), "emulated")

    def in_shares(own_vD, tokens_BT, d_x_BTD):
        gradient = gradient_in_shares(d_x_BTD, tokens_BT, own, ranks, d_x_BTD.dtype)
        return look_up_in_shares(own_vD, tokens_BT, ranks), gradient.astype(own_vD.dtype)

    def exchanged(of_rank):
        by_rank = of_rank.reshape(ranks, -1, *of_rank.shape[1:])
        return lax.all_to_all(by_rank, EXPERT_AXIS, split_axis=0, concat_axis=0).reshape(of_rank.shape)

    def plain(own_vD, tokens_BT, d_x_BTD):
        order_T = jnp.argsort(tokens_BT[0] % ranks)
        asked_T = exchanged(tokens_BT[0, order_T] // ranks)
        x_TD = jnp.zeros_like(d_x_BTD[0]).at[order_T].set(exchanged(own_vD[asked_T]))
        d_own_vD = jnp.zeros_like(own_vD).at[asked_T].add(exchanged(d_x_BTD[0, order_T]))
        return x_TD[None], d_own_vD

    def memory(function):
        def per_rank(*of_rank):
            return tuple(result[None] for result in function(*(one[0] for one in of_rank)))

        program = jax.jit(live.per_rank(per_rank, (RANKED,) * 3, (RANKED,) * 2))
        shapes = ((own, width), dtype), ((1, tokens), jnp.int32), ((1, tokens, width), dtype)
        given = [jax.ShapeDtypeStruct((1, 1, ranks, *shape), dtype) for shape, dtype in shapes]
        sizes = program.lower(*given).compile().memory_analysis()
        return sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes

    assert memory(in_shares) <= 1.1 * memory(plain)


def gradient_alone(wire_dtype):
    """The gradient of all ranks' shares, from tokens and the gradients of their rows; as a run computes it."""

    def gradient(row_T, d_rows_TD):
        return gradient_in_shares(d_rows_TD, row_T, OWN, RANKS, wire_dtype)[None]

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


def test_a_buffer_is_small_and_rounds_are_few():
    """32 rounds if all tokens differ, fewer where a rank has fewer rows; a buffer of one where there are few tokens."""
    assert (requests_at_once(4096, 8), rounds_if_different(4096, 50_304, 8)) == (16, 32)
    assert rounds_if_different(4096, 1024, 8) == 8
    assert (requests_at_once(15, 4), rounds_if_different(15, 24, 4)) == (1, 4)
