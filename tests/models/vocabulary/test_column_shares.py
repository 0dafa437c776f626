"""The layout of a sharded head against NumPy, which cuts the whole matrix into columns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.experts.weight_exchange import from_slices, to_slices
from swift.mesh.hlo_collectives import collective_bytes
from swift.mesh.live import live_mesh
from swift.mesh.per_rank import EXPERT_AXIS, RANKED
from swift.models.vocabulary.layouts import ColumnSharded
from swift.topology import Topology
from tests.models.vocabulary.layouts import run

pytestmark = pytest.mark.usefixtures("strict_types")

CASES = [
    (3, 5, 5, 7),  # the vocabulary is padded, slices begin within rows
    (4, 6, 3, 2),  # fewer columns than ranks, and the norm is in two slices
    (8, 2, 2, 50),  # slices are parts of a row
    (2, 16, 8, 64),
    (1, 4, 4, 6),
]
"""Ranks, parameters of the norm, rows and columns of the matrix."""


def layout_of(num_ranks, num_before, num_rows, num_columns):
    size = num_before + num_rows * num_columns
    kinds = jnp.dtype("float32"), jnp.dtype("float32")
    return ColumnSharded(1, size, num_ranks, *kinds, num_rows=num_rows, num_columns=num_columns)


def shares_of(norm, matrix, num_ranks):
    """The slots of all ranks: the norm, then the rank's columns, with zeros for those beyond the last."""
    share = -(-matrix.shape[1] // num_ranks)
    wide = np.concatenate([matrix, np.zeros((len(matrix), share * num_ranks - matrix.shape[1]), matrix.dtype)], axis=1)
    return np.stack([np.append(norm, wide[:, n * share : (n + 1) * share]) for n in range(num_ranks)])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["emulated", "virtual"])
def test_columns_of_slices_and_slices_of_columns(case, kind):
    layout, random = layout_of(*case), np.random.default_rng(0)
    num_ranks, num_before, *shape = case
    norm, matrix = random.standard_normal(num_before, np.float32), random.standard_normal(shape, np.float32)
    slices = np.asarray(to_slices(np.append(norm, matrix)[None, None], num_ranks))
    found = run(layout.materialize, layout, kind, slices)
    np.testing.assert_array_equal(found[0, :, 0], shares_of(norm, matrix, num_ranks))

    norms_N = random.standard_normal((num_ranks, num_before), np.float32)
    gradients = np.stack([shares_of(own, matrix, num_ranks)[n] for n, own in enumerate(norms_N)])
    collected = from_slices(run(layout.collect, layout, kind, gradients[None, :, None]), layout.size)[0, 0]
    np.testing.assert_allclose(collected[:num_before], norms_N.sum(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(collected[num_before:].reshape(shape), matrix)


def test_the_norm_is_summed_wider_than_it_is_sent():
    """Ones and 2^-9, which a sum in bfloat16 would lose."""
    layout = replace(layout_of(4, 3, 2, 8), wire_dtype=jnp.dtype("bfloat16"))
    norms_N3 = np.array([[1], [1], [1], [2**-9]], np.float32).repeat(3, axis=1)
    gradients = np.concatenate([norms_N3, np.zeros((4, 4), np.float32)], axis=1)
    collected = from_slices(run(layout.collect, layout, "emulated", gradients[None, :, None]), layout.size)[0, 0]
    np.testing.assert_array_equal(collected[:3], np.full(3, 3 + 2**-9, np.float32))


def test_what_is_sent_is_each_number_once():
    """A head of 512 columns over 8 ranks: beside the numbers themselves a few parts of rows, and the norm."""
    layout = layout_of(8, 32, 64, 512)
    live, nowhere = live_mesh(Topology(num_expert_ranks=8), "emulated"), jnp.zeros((1, 8, 1), jnp.int32)
    fill = jax.jit(live.per_rank(lambda own: layout.materialize(own, nowhere), (RANKED,), RANKED))
    slices = jax.ShapeDtypeStruct((1, 1, 8, 1, layout.size // 8), jnp.float32)
    moved = collective_bytes(fill.lower(slices).compile().as_text(), 8)
    assert moved == {"all-to-all": 8 * 8 * layout.message_size * 4}
    assert 8 * layout.message_size <= 1.25 * layout.size / 8 + 8 * 32


def test_slices_of_a_head_of_more_numbers_than_32_bits_count_begin_where_they_should():
    num_ranks, num_before, num_rows, num_columns = case = (8, 16384, 16384, 300_000)
    layout, width = layout_of(*case), -(-(num_before + num_rows * num_columns) // num_ranks)
    starts, offsets = jax.vmap(lambda _: (layout._start(), layout._offset()), axis_name=EXPERT_AXIS)(
        jnp.arange(num_ranks, dtype=jnp.int32)
    )
    assert width * (num_ranks - 1) > 2**31
    assert offsets.tolist() == [(rank * width - num_before) % num_columns for rank in range(num_ranks)]
    assert [start < num_before for start in starts.tolist()] == [rank == 0 for rank in range(num_ranks)]
