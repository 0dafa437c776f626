"""The table that one SPMD program interprets, tick by tick, and the part of it that determines the program's shape.

T: ticks, Q: rounds of a tick, R: live workers in mesh order, H: phases, n: micro-batches that a worker processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from swift.schedules.lowering.messages import NONE, Moves, Permutation
from swift.schedules.ops import Kind
from swift.topology import Worker

NOTHING = 0
"""Opcode of an idle worker; the opcode of an op is its kind plus one."""


class TableShape(NamedTuple):
    """The static part of a table: one compiled program runs all tables of equal shape.

    Attributes:
        num_ticks, num_live, num_phases: T, R, H.
        num_data: micro-batches that a worker processes, n.
        num_activation_rounds, num_gradient_rounds: rounds of a tick in either direction, Q.
        activation_permutations, gradient_permutations: permutations that a round can use.
        num_b_stash, num_held, num_w_stash, num_activations, num_gradients: slots of every worker.
    """

    num_ticks: int
    num_live: int
    num_phases: int
    num_data: int
    num_activation_rounds: int
    num_gradient_rounds: int
    activation_permutations: tuple[Permutation, ...]
    gradient_permutations: tuple[Permutation, ...]
    num_b_stash: int
    num_held: int
    num_w_stash: int
    num_activations: int
    num_gradients: int


@dataclass(frozen=True, eq=False, kw_only=True)
class TickTable:
    """The ops of every live worker in every tick; ``NONE`` where a field does not apply.

    In a tick a worker first runs its op, which may read any slot written in an earlier tick. Then messages move: the
    output of F to the activation inbox of the worker that runs the next chunk, the output of B to the gradient inbox of
    that of the previous chunk. Where this is the same worker, the op writes its output there itself. The slot that an
    op is the last to read may be written again from the end of its tick on.

    Updates are rare, so the ticks are divided into phases during which no parameters change: all Us of a phase are in
    its last tick. Ticks after the last phase are padding and need not be run.

    Attributes:
        workers: live workers, the rows of the mesh axis ``worker``.
        opcode_TR: int32, ``NOTHING`` or ``Kind`` + 1.
        iteration_TR, pipeline_TR, microbatch_TR: int32, identity of the op's data; for U, the worker's own pipeline and
            no micro-batch.
        chunk_TR: int32, chunk of the op.
        data_TR: int32, index of the op's micro-batch among those of its worker; ``NONE`` for U.
        b_stash_TR: int32, slot of the values that F keeps for B only.
        held_TR: int32, slot of the values that F keeps for W, which B may read as well.
        w_stash_TR: int32, slot of the values that B keeps for W.
        inbox_TR: int32, slot that the op reads: in the activation inbox for F (except of the first chunk), in the
            gradient inbox for B.
        loss_TR: int32, slot of the gradient inbox into which the last chunk's F writes the gradient of the loss.
        own_slot_TR: int32, slot of the worker's own inbox for the output of an op whose reader is on the same worker.
        data_Rn: int32[R, n, 3], (iteration, pipeline, micro-batch) of all micro-batches of a worker, in F order.
        phase_bounds: int32[H + 1], phase h is the ticks ``phase_bounds[h]:phase_bounds[h + 1]``.
        update_HR: int32, iteration whose U a worker runs at the end of each phase.
        update_chunk_HR: int32, chunk of that U.
        activations: messages of Fs.
        gradients: messages of Bs.
        num_b_stash, num_held, num_w_stash: slots that every worker needs.
    """

    workers: tuple[Worker, ...]
    opcode_TR: np.ndarray
    iteration_TR: np.ndarray
    pipeline_TR: np.ndarray
    microbatch_TR: np.ndarray
    chunk_TR: np.ndarray
    data_TR: np.ndarray
    b_stash_TR: np.ndarray
    held_TR: np.ndarray
    w_stash_TR: np.ndarray
    inbox_TR: np.ndarray
    loss_TR: np.ndarray
    own_slot_TR: np.ndarray
    data_Rn: np.ndarray
    phase_bounds: np.ndarray
    update_HR: np.ndarray
    update_chunk_HR: np.ndarray
    activations: Moves
    gradients: Moves
    num_b_stash: int
    num_held: int
    num_w_stash: int

    @property
    def num_ticks(self) -> int:
        """Number of ticks, T."""
        return len(self.opcode_TR)

    @property
    def num_phases(self) -> int:
        """Number of phases, H."""
        return len(self.update_HR)

    @property
    def num_rounds_T(self) -> np.ndarray:
        """Number of collectives in every tick, over both directions, int64[T]."""
        return self.activations.num_rounds_T + self.gradients.num_rounds_T

    @property
    def shape(self) -> TableShape:
        """Shape for which a program that runs this table is compiled."""
        return TableShape(
            num_ticks=self.num_ticks,
            num_live=len(self.workers),
            num_phases=self.num_phases,
            num_data=self.data_Rn.shape[1],
            num_activation_rounds=self.activations.permutation_TQ.shape[1],
            num_gradient_rounds=self.gradients.permutation_TQ.shape[1],
            activation_permutations=self.activations.permutations,
            gradient_permutations=self.gradients.permutations,
            num_b_stash=self.num_b_stash,
            num_held=self.num_held,
            num_w_stash=self.num_w_stash,
            num_activations=self.activations.num_slots,
            num_gradients=self.gradients.num_slots,
        )

    def padded(self, shape: TableShape) -> "TickTable":
        """Pads the table to a larger shape with ticks and slots that do nothing and run no collective.

        Args:
            shape: target shape, at least the table's own in every field and with all of its permutations; see
                ``common_shape``.
        """
        assert common_shape([shape, self.shape]) == shape, f"no room in {shape} for {self.shape}"
        T, R, H, n = shape.num_ticks, shape.num_live, shape.num_phases, shape.num_data
        return replace(
            self,
            **self._map_columns(lambda column_TR, empty: _filled(column_TR, (T, R), empty)),
            data_Rn=_filled(self.data_Rn, (R, n, 3)),
            phase_bounds=_filled(self.phase_bounds, (H + 1,), int(self.phase_bounds[-1])),
            update_HR=_filled(self.update_HR, (H, R)),
            update_chunk_HR=_filled(self.update_chunk_HR, (H, R)),
            activations=_padded_moves(
                self.activations, T, shape.num_activation_rounds, shape.activation_permutations, shape.num_activations
            ),
            gradients=_padded_moves(
                self.gradients, T, shape.num_gradient_rounds, shape.gradient_permutations, shape.num_gradients
            ),
            num_b_stash=shape.num_b_stash,
            num_held=shape.num_held,
            num_w_stash=shape.num_w_stash,
        )

    def forward_only(self) -> "TickTable":
        """Keeps only the Fs and their messages, in one phase without stashes and updates, for evaluation."""
        is_f_TR = self.opcode_TR == Kind.F + 1
        ticks = np.flatnonzero(is_f_TR.any(axis=1))
        columns = self._map_columns(lambda column_TR, empty: np.where(is_f_TR, column_TR, empty)[ticks])
        unused = np.full_like(columns["data_TR"], NONE)
        return replace(
            self,
            **columns | dict.fromkeys(("b_stash_TR", "held_TR", "w_stash_TR", "loss_TR"), unused),
            phase_bounds=np.array([0, len(ticks)], np.int32),
            update_HR=np.full((1, len(self.workers)), NONE, np.int32),
            update_chunk_HR=np.full((1, len(self.workers)), NONE, np.int32),
            activations=replace(
                self.activations,
                permutation_TQ=self.activations.permutation_TQ[ticks],
                slot_TQR=self.activations.slot_TQR[ticks],
            ),
            gradients=Moves(
                (), np.empty((len(ticks), 0), np.int32), np.empty((len(ticks), 0, len(self.workers)), np.int32), 0
            ),
            num_b_stash=0,
            num_held=0,
            num_w_stash=0,
        )

    def _map_columns(self, change: Callable[[np.ndarray, int], np.ndarray]) -> dict[str, Any]:
        """Applies ``change(column, empty value)`` to every column ``[T, R]``."""
        names = [field.name for field in fields(self) if field.name.endswith("_TR")]
        return {name: change(getattr(self, name), NOTHING if name == "opcode_TR" else NONE) for name in names}


def common_shape(shapes: Sequence[TableShape]) -> TableShape:
    """Finds the smallest shape to which tables of these shapes can be padded; all must have equally many rows."""
    assert len({shape.num_live for shape in shapes}) == 1, "tables with different numbers of workers"
    activation = dict.fromkeys(permutation for shape in shapes for permutation in shape.activation_permutations)
    gradient = dict.fromkeys(permutation for shape in shapes for permutation in shape.gradient_permutations)
    largest = {
        name: max(getattr(shape, name) for shape in shapes) for name in TableShape._fields if name.startswith("num_")
    }
    return TableShape(**largest, activation_permutations=tuple(activation), gradient_permutations=tuple(gradient))


def _filled(array: np.ndarray, shape: tuple[int, ...], value: int = NONE) -> np.ndarray:
    """Pads an array with ``value`` at the end of each dim, up to ``shape``."""
    return np.pad(array, [(0, to - size) for size, to in zip(array.shape, shape, strict=True)], constant_values=value)


def _padded_moves(
    moves: Moves, num_ticks: int, num_rounds: int, permutations: tuple[Permutation, ...], num_slots: int
) -> Moves:
    """Pads messages to more ticks, rounds, permutations and slots."""
    index = np.array([*map(permutations.index, moves.permutations), NONE], np.int32)
    return Moves(
        permutations,
        _filled(index[moves.permutation_TQ], (num_ticks, num_rounds)),
        _filled(moves.slot_TQR, (num_ticks, num_rounds, moves.slot_TQR.shape[2])),
        num_slots,
    )
