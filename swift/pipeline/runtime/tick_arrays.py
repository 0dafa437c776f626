"""A tick table as arrays, the arguments of a step function: a new table of the same shape compiles nothing.

Legend: T ticks, Q rounds of a tick, R live workers, H phases, n micro-batches of a worker.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from swift.schedules import TickTable

Array = jax.Array | np.ndarray
"""NumPy on the host, JAX on devices."""


class Common(NamedTuple):
    """Columns that are the same for all workers."""

    activations_TQ: Array  # int32, the permutation that moves in a round; -1: none
    gradients_TQ: Array  # int32
    phases_H2: Array  # int32, first tick and end of every phase


class Columns(NamedTuple):
    """A worker's columns; global arrays have a leading dim R."""

    opcode_T: Array  # int32, the fields of ``TickTable``
    iteration_T: Array
    data_T: Array
    b_stash_T: Array
    held_T: Array
    w_stash_T: Array
    inbox_T: Array
    loss_T: Array
    activation_slot_TQ: Array
    gradient_slot_TQ: Array
    update_H: Array  # int32, the iteration that is updated at the end of a phase; -1: none
    data_iteration_n: Array  # int32, the iteration of each of the worker's micro-batches; -1: padding


class TickOp(NamedTuple):
    """A worker's op in one tick: int32[] each, and int32[Q] slots for the messages that it receives."""

    opcode: jax.Array
    iteration: jax.Array
    data: jax.Array
    b_stash: jax.Array
    held: jax.Array
    w_stash: jax.Array
    inbox: jax.Array
    loss: jax.Array
    activation_slot_Q: jax.Array
    gradient_slot_Q: jax.Array

    @classmethod
    def at(cls, columns: Columns, tick: Int[jax.Array, ""]) -> "TickOp":
        """The op of a tick."""
        return cls(*(jnp.asarray(column)[tick] for column in columns[: len(cls._fields)]))


def table_arrays(table: TickTable) -> tuple[Common, Columns]:
    """The arrays of a tick table, on the host."""
    bounds = table.phase_bounds
    common = Common(
        table.activations.permutation_TQ,
        table.gradients.permutation_TQ,
        np.stack([bounds[:-1], bounds[1:]], axis=1).astype(np.int32),
    )
    fields_TR = (
        table.opcode_TR,
        table.iteration_TR,
        table.data_TR,
        table.b_stash_TR,
        table.held_TR,
        table.w_stash_TR,
        table.inbox_TR,
        table.loss_TR,
    )
    slots_RTQ = [moves.slot_TQR.transpose(2, 0, 1) for moves in (table.activations, table.gradients)]
    columns = [*(field_TR.T for field_TR in fields_TR), *slots_RTQ, table.update_HR.T, table.data_Rn[..., 0]]
    return common, Columns(*(np.ascontiguousarray(column) for column in columns))
