"""The look-up in shares against NumPy, which indexes the whole table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.mesh import EXPERT_AXIS, RANKED, live_mesh
from swift.models.vocabulary import hot_rows, look_up_rows
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
