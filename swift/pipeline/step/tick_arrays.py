"""A tick table as array arguments of a step function: a new table with the same shape needs no recompilation.

Legend: T ticks, Q rounds of a tick, R live workers, H phases, n micro-batches of a worker.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from swift.pipeline.split_backward.partition import Stashes
from swift.schedules.lowering.tick_table import TickTable
from swift.schedules.problem import Kind

_Array = jax.Array | np.ndarray
"""NumPy on the host, JAX on devices."""


class Common(NamedTuple):
    """Columns that are the same for all workers."""

    activations_TQ: _Array  # int32, index of the permutation in each round; -1: none
    gradients_TQ: _Array  # int32, likewise
    phases_H2: _Array  # int32, first tick and end (exclusive) of every phase


class Columns(NamedTuple):
    """Columns of a worker; global arrays have a leading dim R."""

    opcode_T: _Array  # int32 like the next 11 columns; for their meaning see ``TickTable``
    iteration_T: _Array
    data_T: _Array
    b_stash_T: _Array
    held_T: _Array
    w_stash_T: _Array
    inbox_T: _Array
    loss_T: _Array
    chunk_T: _Array
    own_slot_T: _Array
    activation_slot_TQ: _Array
    gradient_slot_TQ: _Array
    update_H: _Array  # int32, the iteration whose update comes at the end of a phase; -1: none
    update_chunk_H: _Array  # int32, the chunk to update; -1: none
    ends_iteration_H: _Array  # bool, whether it is the worker's last update of its iteration
    token_iteration_n: _Array  # int32, iteration of each micro-batch whose tokens the worker counts; -1 for others

    @property
    def updates(self) -> tuple[_Array, _Array, _Array]:
        """Iteration and chunk for the update at the end of each phase, and whether it is the iteration's last."""
        return self.update_H, self.update_chunk_H, self.ends_iteration_H


class TickOp(NamedTuple):
    """Op of a worker in one tick: int32[] fields, and int32[Q] slots for the messages that the worker receives."""

    opcode: jax.Array
    iteration: jax.Array
    data: jax.Array
    stash_for_b: jax.Array
    stash_for_b_and_w: jax.Array
    stash_for_w: jax.Array
    inbox: jax.Array
    loss: jax.Array
    chunk: jax.Array
    own_slot: jax.Array
    activation_slot_Q: jax.Array
    gradient_slot_Q: jax.Array

    @property
    def stash_slots(self) -> Stashes:
        """Slot that the op uses in each stash."""
        return Stashes(self.stash_for_b, self.stash_for_b_and_w, self.stash_for_w)

    @classmethod
    def at(cls, columns: Columns, tick: Int[jax.Array, ""]) -> "TickOp":
        """Returns the op of a tick."""
        return cls(*(jnp.asarray(column)[tick] for column in columns[: len(cls._fields)]))


def table_arrays(table: TickTable) -> tuple[Common, Columns]:
    """Converts a tick table to arrays, on the host."""
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
        table.chunk_TR,
        table.own_slot_TR,
    )
    slots_RTQ = [moves.slot_TQR.transpose(2, 0, 1) for moves in (table.activations, table.gradients)]
    updates = table.update_HR.T, table.update_chunk_HR.T, _ends_iteration(table.update_HR).T
    columns = [*(field_TR.T for field_TR in fields_TR), *slots_RTQ, *updates, _token_iterations(table)]
    return common, Columns(*(np.ascontiguousarray(column) for column in columns))


def _ends_iteration(update_HR: np.ndarray) -> np.ndarray:
    """Returns whether each update is the last one of its iteration on its worker, bool[H, R]."""
    is_last_HR = np.zeros(update_HR.shape, bool)
    for row, iteration_H in enumerate(update_HR.T):
        for iteration in set(iteration_H[iteration_H >= 0].tolist()):
            is_last_HR[np.flatnonzero(iteration_H == iteration)[-1], row] = True
    return is_last_HR


def _token_iterations(table: TickTable) -> np.ndarray:
    """Returns each micro-batch's iteration on the worker that runs its F on the first chunk, int32[R, n]; -1 elsewhere.

    Thus exactly one worker counts each token of a batch.
    """
    counted_Rn = np.full(table.data_Rn.shape[:2], -1, np.int32)
    tick, row = np.nonzero((table.opcode_TR == Kind.F + 1) & (table.chunk_TR == 0))
    counted_Rn[row, table.data_TR[tick, row]] = table.iteration_TR[tick, row]
    return counted_Rn
