"""The layout of a sharded embedding against NumPy, which deals the rows of the whole table to the ranks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.mesh.hlo_collectives import collective_bytes
from swift.mesh.live import live_mesh
from swift.mesh.per_rank import RANKED
from swift.models.vocabulary.layouts import RowSharded
from swift.topology import Topology
from tests.models.vocabulary.layouts import run

pytestmark = pytest.mark.usefixtures("strict_types")

CASES = [
    (3, 5, 7, 2),  # neither positions nor rows divide by the ranks
    (4, 8, 2, 3),  # fewer rows than ranks
    (2, 0, 6, 4),  # no positions
    (1, 3, 4, 5),
]
"""Ranks, parameters before the rows, rows and their width."""


def layout_of(num_ranks, num_before, num_rows, row_size):
    size = num_before + num_rows * row_size
    kinds = jnp.dtype("float32"), jnp.dtype("float32")
    return RowSharded(1, size, num_ranks, *kinds, num_rows=num_rows, row_size=row_size)


def dealt(table_VD, num_ranks):
    """The rows of all ranks, one after another ``[N, v * D]``, with zeros for those beyond the last."""
    share = -(-len(table_VD) // num_ranks)
    found = np.zeros((num_ranks, share, table_VD.shape[1]), table_VD.dtype)
    for number, row in enumerate(table_VD):
        found[number % num_ranks, number // num_ranks] = row
    return found.reshape(num_ranks, -1)


def sliced(before_P, num_ranks):
    """Consecutive parts of a vector ``[N, p]``, of which the last are padded."""
    width = -(-len(before_P) // num_ranks)
    return np.stack(
        [np.pad(before_P, (0, width * num_ranks - len(before_P)))[n * width :][:width] for n in range(num_ranks)]
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["emulated", "virtual"])
def test_state_and_slots_have_the_rows_of_their_rank(case, kind):
    layout, random = layout_of(*case), np.random.default_rng(0)
    num_ranks, num_before, *shape = case
    before, table = random.standard_normal(num_before, np.float32), random.standard_normal(shape, np.float32)
    whole = np.append(before, table)[None, None]
    state = np.concatenate([sliced(before, num_ranks), dealt(table, num_ranks)], axis=1)[None, :, None]
    np.testing.assert_array_equal(layout.init(whole, None), state)
    np.testing.assert_array_equal(jax.jit(lambda params: layout.init(params, None))(whole), state)
    np.testing.assert_array_equal(layout.classes(state, None), whole)

    slots = run(layout.materialize, layout, kind, state)[0, :, 0]
    np.testing.assert_array_equal(slots[:, :num_before], np.tile(before, (num_ranks, 1)))
    np.testing.assert_array_equal(slots[:, num_before:], dealt(table, num_ranks))

    before_NP = random.standard_normal((num_ranks, num_before), np.float32)
    gradients = np.concatenate([before_NP, dealt(table, num_ranks)], axis=1)
    collected = layout.classes(run(layout.collect, layout, kind, gradients[None, :, None]), None)[0, 0]
    np.testing.assert_allclose(collected[:num_before], before_NP.sum(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(collected[num_before:].reshape(shape), table)


def test_narrow_slots_and_state_as_it_is_stored():
    """Weights are rounded to the slots' type; moments in bfloat16 are laid out on the host as they are."""
    layout = replace(layout_of(2, 3, 4, 2), compute_dtype=jnp.dtype("bfloat16"))
    narrow = np.arange(11, dtype=np.float32).astype(jnp.bfloat16)[None, None]
    assert layout.init(narrow, None).dtype == jnp.bfloat16
    np.testing.assert_array_equal(layout.classes(layout.init(narrow, None), None), narrow)
    assert (
        run(layout.materialize, layout, "virtual", layout.init(narrow.astype(np.float32), None)).dtype == jnp.bfloat16
    )


@pytest.mark.parametrize("num_before", [16, 0])
def test_no_row_is_sent(num_before):
    layout = layout_of(8, num_before, 64, 512)
    live, nowhere = live_mesh(Topology(num_expert_ranks=8), "emulated"), jnp.zeros((1, 8, 1), jnp.int32)
    width = layout.init(np.zeros((1, 1, layout.size), np.float32), None).shape[-1]
    for function, size in ((layout.materialize, width), (layout.collect, num_before + 8 * 512)):
        program = jax.jit(live.per_rank(lambda own, do=function: do(own, nowhere), (RANKED,), RANKED))
        given = jax.ShapeDtypeStruct((1, 1, 8, 1, size), jnp.float32)
        moved = collective_bytes(program.lower(given).compile().as_text(), 8)
        assert moved == ({"all-to-all": 8 * num_before * 4} if num_before else {})
