"""``lax.ragged_all_to_all`` on CPU, where XLA does not have it, written from its documentation."""

import jax
import jax.numpy as jnp
import pytest

from swift.experts.capacity import token_exchange


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Reads what everybody sends from copies of it all; nothing but NaN if the sizes do not match, or do not fit."""
    own = jax.lax.axis_index(axis_name)
    operands, starts, sizes, targets = (
        jax.lax.all_gather(one, axis_name) for one in (operand, input_offsets, send_sizes, output_offsets)
    )
    row, result = jnp.arange(len(output), dtype=jnp.int32), output
    is_sound = (recv_sizes == sizes[:, own]).all() & (input_offsets + send_sizes <= len(operand)).all()
    num_writers = jnp.zeros_like(row)
    for rows, start, size, target in zip(operands, starts[:, own], sizes[:, own], targets[:, own], strict=True):
        is_here = (row >= target) & (row < target + size)
        num_writers += is_here.astype(jnp.int32)
        is_sound &= (target >= 0) & (start >= 0) & (size >= 0) & (target + size <= len(output))
        result = jnp.where(is_here[:, None], rows.at[start + row - target].get(mode="fill", fill_value=0), result)
    return jnp.where(is_sound & (num_writers <= 1).all(), result, jnp.nan)


@pytest.fixture
def ragged(monkeypatch):
    """Layers exchange rows as on TPU and GPU."""
    monkeypatch.setattr(token_exchange, "is_ragged", lambda _: True)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
