"""Tick table that one SPMD program interprets tick by tick, and its static shape, for which the program is compiled.

XLA's ``ppermute`` takes a static permutation, so messages between workers are covered by a few permutations (``move``).
Stashes and inbox messages live in slots. Intervals that do not overlap share a slot (``interval_slots``).

Shape suffixes: T ticks, Q rounds per tick, R live workers (rows of the mesh axis ``worker``), H phases, n micro-batches
that a worker processes, e messages in one direction, i intervals.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from swift.schedules.problem import Kind
from swift.topology import Worker

Permutation = tuple[tuple[int, int], ...]
"""(sending row, receiving row) pairs, as for ``jax.lax.ppermute``; rows may be absent."""

NONE = -1
_RARE = 0.02
"""Fraction of ticks below which a pattern of messages is rare: it may take one more round to avoid a permutation."""

NOTHING = 0
"""Opcode of an idle worker; the opcode of an op is its kind + 1."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Messages in one direction, tick by tick.

    Attributes:
        permutations: distinct permutations. A collective also involves workers without a message; their receivers have
            no slot and ignore the data.
        permutation_TQ: int32, index of each round's permutation; ``NONE`` for a round without a collective.
        slot_TQR: int32, inbox slot into which a worker receives; ``NONE`` if it receives no message.
        num_slots: number of slots in every worker's inbox.
    """

    permutations: tuple[Permutation, ...]
    permutation_TQ: np.ndarray
    slot_TQR: np.ndarray
    num_slots: int

    @property
    def num_rounds_T(self) -> np.ndarray:
        """Number of rounds with a collective in every tick, int64[T]."""
        return (self.permutation_TQ != NONE).sum(axis=1)


def move(
    tick_e: np.ndarray, sender_e: np.ndarray, receiver_e: np.ndarray, slot_e: np.ndarray, num_ticks: int, num_live: int
) -> Moves:
    """Groups messages into rounds and covers the rounds by a few permutations.

    A worker receives at most one message per round, so a tick needs as many rounds as the largest number of messages
    that one worker receives in it. A worker sends at most one message per tick, since it runs one op per tick. Ticks
    with the same senders and receivers share their rounds. Patterns that need one round leave no choice and are covered
    first, starting with the most frequent one. Rare patterns may take one more round if that saves a permutation, since
    each permutation makes the compiled program larger.

    Args:
        tick_e: tick at whose end each message moves.
        sender_e, receiver_e: rows of the sending and the receiving worker.
        slot_e: slot in the receiver's inbox.
        num_ticks: number of ticks, T.
        num_live: number of live workers, R.
    """
    by_tick = np.lexsort((sender_e, receiver_e, tick_e))
    in_tick = np.split(by_tick, np.cumsum(np.bincount(tick_e, minlength=num_ticks))[:-1])
    alike: dict[bytes, list[int]] = defaultdict(list)
    for tick in np.unique(tick_e).tolist():
        alike[np.stack([sender_e[in_tick[tick]], receiver_e[in_tick[tick]]]).tobytes()].append(tick)
    first = {ticks[0]: ticks for ticks in alike.values()}
    needed = {tick: int(np.bincount(receiver_e[in_tick[tick]]).max()) for tick in first}
    palette, rounds = _PermutationSet(num_live), {}
    for tick in sorted(first, key=lambda tick: (needed[tick], -len(first[tick]), -len(in_tick[tick]))):
        is_rare = len(first[tick]) < _RARE * num_ticks
        messages = in_tick[tick]
        rounds[tick] = palette.cover(sender_e[messages], receiver_e[messages], needed[tick] + is_rare)
    num_rounds = max(map(len, rounds.values()), default=0)
    permutation_TQ = np.full((num_ticks, num_rounds), NONE, np.int32)
    slot_TQR = np.full((num_ticks, num_rounds, num_live), NONE, np.int32)
    for tick, ticks in first.items():
        for round_index, (permutation, chosen) in enumerate(rounds[tick]):
            permutation_TQ[ticks, round_index] = permutation
            for same in ticks:
                messages = in_tick[same][chosen]
                slot_TQR[same, round_index, receiver_e[messages]] = slot_e[messages]
    return Moves(palette.permutations(), permutation_TQ, slot_TQR, int(slot_e.max(initial=-1)) + 1)


class _PermutationSet:
    """Permutations chosen so far; each can be extended by pairs of unused rows.

    Shape suffix: c permutations.
    """

    def __init__(self, num_live: int):
        self.receiver_cR = np.full((0, num_live), NONE, np.int32)
        self.sender_cR = np.full((0, num_live), NONE, np.int32)

    def cover(self, sender_e: np.ndarray, receiver_e: np.ndarray, most_rounds: int) -> list[tuple[int, np.ndarray]]:
        """Chooses rounds that carry all messages in a tick, as (permutation, indices of the messages in that round).

        Args:
            sender_e: sending rows, without duplicates.
            receiver_e: receiving rows, ascending.
            most_rounds: largest number of rounds, at least the number of messages that one row receives.
        """
        rounds: list[tuple[int, np.ndarray]] = []
        left = np.arange(len(sender_e))
        while len(left):
            permutation, chosen = self.choose(sender_e[left], receiver_e[left], most_rounds - len(rounds))
            rounds.append((permutation, left[chosen]))
            left = np.delete(left, chosen)
        return rounds

    def choose(self, sender_e: np.ndarray, receiver_e: np.ndarray, rounds_left: int) -> tuple[int, np.ndarray]:
        """Chooses the permutation that carries the most messages in one round, and extends it to carry them.

        A receiver with as many messages left as there are rounds left must be served in this round. If no permutation
        serves all such receivers, a new one is added.

        Returns:
            The index of the permutation, and the indices of the messages that it carries.
        """
        receiver_ce, sender_ce = self.receiver_cR[:, sender_e], self.sender_cR[:, receiver_e]
        fits_ce = ((receiver_ce == NONE) | (receiver_ce == receiver_e)) & (
            (sender_ce == NONE) | (sender_ce == sender_e)
        )
        _, first, count = np.unique(receiver_e, return_index=True, return_counts=True)
        served = np.logical_or.reduceat(fits_ce, first, axis=1)
        score = np.where(served[:, count == rounds_left].all(axis=1), served.sum(axis=1), 0)
        # No permutation fits: each leaves out a receiver that must be served in this round, or carries no message.
        if not score.any():
            new = np.full((1, self.receiver_cR.shape[1]), NONE, np.int32)
            self.receiver_cR, self.sender_cR = np.append(self.receiver_cR, new, 0), np.append(self.sender_cR, new, 0)
            permutation, fitting = len(self.receiver_cR) - 1, np.arange(len(sender_e))
        else:
            permutation = int(np.argmax(score))
            fitting = np.flatnonzero(fits_ce[permutation])
        chosen = fitting[np.unique(receiver_e[fitting], return_index=True)[1]]
        self.receiver_cR[permutation, sender_e[chosen]] = receiver_e[chosen]
        self.sender_cR[permutation, receiver_e[chosen]] = sender_e[chosen]
        return permutation, chosen

    def permutations(self) -> tuple[Permutation, ...]:
        """Returns the permutations as (sending row, receiving row) pairs."""
        return tuple(
            tuple((sender, receiver) for sender, receiver in enumerate(row) if receiver != NONE)
            for row in self.receiver_cR.tolist()
        )


def interval_slots(row_i: np.ndarray, start_i: np.ndarray, end_i: np.ndarray, num_live: int) -> np.ndarray:
    """Allocates a slot to each interval on its row, with as few slots as possible.

    Args:
        row_i: row of each interval.
        start_i, end_i: first and last tick of each interval. A slot that is freed in a tick can be reused from the same
            tick on.
        num_live: number of live workers, R.

    Returns:
        Slot of each interval, from 0, int32[i].
    """
    slot_i = np.full(len(row_i), NONE, np.int32)
    free = np.zeros((num_live, int(np.bincount(row_i, minlength=1).max())), np.int32)
    num_free, num_used = np.zeros((2, num_live), np.int32)
    ending_in = np.split(np.argsort(end_i, kind="stable"), np.cumsum(np.bincount(end_i, minlength=1)))
    by_start = np.argsort(start_i, kind="stable")
    starting_in = np.split(by_start, np.cumsum(np.bincount(start_i, minlength=1)))
    for tick, starting in enumerate(starting_in[:-1]):
        # Slots are freed before others are taken, so that a slot can be reused within a tick.
        for ending in _rows_apart(ending_in[tick], row_i) if tick < len(ending_in) else ():
            free[row_i[ending], num_free[row_i[ending]]] = slot_i[ending]
            num_free[row_i[ending]] += 1
        for beginning in _rows_apart(starting, row_i):
            rows = row_i[beginning]
            again = num_free[rows] > 0
            slot_i[beginning] = np.where(again, free[rows, num_free[rows] - 1], num_used[rows])
            num_free[rows] -= again
            num_used[rows] += ~again
    return slot_i


def _rows_apart(intervals: np.ndarray, row_i: np.ndarray) -> list[np.ndarray]:
    """Splits intervals into groups in which no row occurs twice, so that writes can be vectorized."""
    occurrence = _occurrence(row_i[intervals])
    return [intervals[occurrence == t] for t in range(int(occurrence.max(initial=-1)) + 1)]


def _occurrence(keys: np.ndarray) -> np.ndarray:
    """Counts the earlier occurrences of each key."""
    order = np.argsort(keys, kind="stable")
    first = np.searchsorted(keys[order], keys[order])
    occurrence = np.empty(len(keys), np.int64)
    occurrence[order] = np.arange(len(keys)) - first
    return occurrence


class TableShape(NamedTuple):
    """Static part of a table: one compiled program runs all tables with the same shape.

    Attributes:
        num_ticks, num_live, num_phases: numbers of ticks, live workers and phases: T, R, H.
        num_data: largest number of micro-batches that a worker processes, n.
        num_activation_rounds, num_gradient_rounds: numbers of rounds per tick in each direction, Q.
        activation_permutations, gradient_permutations: permutations that a round in each direction can use.
        num_b_stash, num_held, num_w_stash, num_activations, num_gradients: numbers of slots on every worker.
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
    """The op of every live worker in every tick; ``NONE`` where a field does not apply.

    A tick has two parts. First each worker runs its op, which may read any slot written in an earlier tick. Then
    messages move: F's output to the activation inbox of the next chunk's worker, B's output to the gradient inbox of
    the previous chunk's worker. If the reader is on the same worker, the op writes its output to that inbox itself.
    A slot can be reused from the end of the tick in which its last reader runs.

    Updates are rare, so the ticks are divided into phases in which parameters are constant: all Us of a phase are in
    its last tick. Ticks after the last phase are padding and need not run.

    Attributes:
        workers: live workers, the rows of the mesh axis ``worker``.
        opcode_TR: int32, ``NOTHING`` or ``Kind`` + 1.
        iteration_TR, pipeline_TR, microbatch_TR: int32, identity of the op's micro-batch; for U, the worker's own
            pipeline and no micro-batch.
        chunk_TR: int32, chunk of the op.
        data_TR: int32, index of the op's micro-batch in its worker's row of ``data_Rn``; ``NONE`` for U.
        b_stash_TR: int32, slot of the values that F keeps for B only.
        held_TR: int32, slot of the values that F keeps for W, which B may read too.
        w_stash_TR: int32, slot of the values that B keeps for W.
        inbox_TR: int32, slot that the op reads: in the activation inbox for F (except on the first chunk), in the
            gradient inbox for B.
        loss_TR: int32, slot in the gradient inbox into which the last chunk's F writes the loss gradient.
        own_slot_TR: int32, slot in the worker's own inbox for an output whose reader is on the same worker.
        data_Rn: int32[R, n, 3], (iteration, pipeline, micro-batch) of each worker's micro-batches, in the order of
            their first F.
        phase_bounds: int32[H + 1], phase h has the ticks ``phase_bounds[h]:phase_bounds[h + 1]``.
        update_HR: int32, iteration whose U a worker runs at the end of each phase.
        update_chunk_HR: int32, chunk of that U.
        activations: messages sent by Fs.
        gradients: messages sent by Bs.
        num_b_stash, num_held, num_w_stash: numbers of slots on every worker.
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
        """Number of collectives in every tick, in both directions together, int64[T]."""
        return self.activations.num_rounds_T + self.gradients.num_rounds_T

    @property
    def shape(self) -> TableShape:
        """Shape for which the program that runs this table is compiled."""
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
        """Pads the table to a larger shape. Additional ticks run no op and no collective; additional slots stay unused.

        Args:
            shape: target shape, at least as large as the table's own in every field and with all of its permutations;
                see ``common_shape``.
        """
        assert common_shape([shape, self.shape]) == shape, f"no room in {shape} for {self.shape}"
        T, R, H, n = shape.num_ticks, shape.num_live, shape.num_phases, shape.num_data
        return replace(
            self,
            **self._map_columns(lambda column_TR, empty: _filled(column_TR, (T, R), empty)),
            data_Rn=_filled(self.data_Rn, (R, n, 3)),
            # Additional phases are empty: their bounds repeat the last one.
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
        """Returns a table for evaluation: only Fs and their messages, in one phase, without stashes and updates."""
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
    """Returns the smallest shape to which tables of these shapes can be padded.

    Args:
        shapes: shapes with the same number of live workers.
    """
    assert len({shape.num_live for shape in shapes}) == 1, "tables with different numbers of workers"
    activation = dict.fromkeys(permutation for shape in shapes for permutation in shape.activation_permutations)
    gradient = dict.fromkeys(permutation for shape in shapes for permutation in shape.gradient_permutations)
    largest = {
        name: max(getattr(shape, name) for shape in shapes) for name in TableShape._fields if name.startswith("num_")
    }
    return TableShape(**largest, activation_permutations=tuple(activation), gradient_permutations=tuple(gradient))


def _filled(array: np.ndarray, shape: tuple[int, ...], value: int = NONE) -> np.ndarray:
    """Pads an array at the end of each dim with ``value``."""
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
