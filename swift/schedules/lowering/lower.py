"""Lowering of a schedule to a ``TickTable``, and the bytes that its slots occupy.

A stash occupies its slot from the tick in which it is written to the tick of its last reader. A message occupies its
slot from the tick after it moves. While an op runs, its inputs and outputs coexist: B holds its own stash and the
values that F keeps for W, and writes the W-stash in addition. ``peak_memory`` instead lets B overwrite its input with
the W-stash. The two measures therefore differ within ticks, by at most the smaller stash. Between ticks no B runs, and
the measures agree on stashes.

Shape suffixes: T ticks, R live workers in mesh order, H phases, n ops of a schedule. Arrays of op indices have the dims
K iterations, n micro-batches and P chunks.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from swift.schedules.lowering.tick_table import NONE, NOTHING, Moves, TickTable, interval_slots, move
from swift.schedules.lowering.ticks import assign_ticks
from swift.schedules.problem import Kind
from swift.schedules.schedule import Schedule


def lower(schedule: Schedule, tick_n: np.ndarray | None = None) -> TickTable:
    """Lowers a valid schedule to its tick table. Workers keep their order of ops.

    Even without decoupling, a gradient moves right after its B, although no op reads it before the end of W.

    Args:
        schedule: schedule to lower.
        tick_n: int64[n], tick of every op; None for ``assign_ticks``.
    """
    problem = schedule.problem
    tick_n = assign_ticks(schedule) if tick_n is None else tick_n
    live = problem.live_workers
    row_of = np.full(problem.num_pipelines * problem.num_stages, NONE)
    row_of[[d * problem.num_stages + p for d, p in live]] = np.arange(len(live))
    placed = _Placed(tick_n, row_of[schedule.worker], int(tick_n.max()) + 1, len(live))
    f_KnP, b_KnP, w_KnP = schedule.rows_of_microbatches
    b_slots, b_and_w_slots, w_slots = (placed.slots(*pair) for pair in ((f_KnP, b_KnP), (f_KnP, w_KnP), (b_KnP, w_KnP)))
    activation = placed.slots(f_KnP[..., :-1], f_KnP[..., 1:])
    # On the last chunk's worker, the loss gradient shares the gradient inbox with the gradients of its other chunks.
    gradients_and_loss = placed.slots(np.append(b_KnP[..., 1:], f_KnP[..., -1:], axis=-1), b_KnP)
    gradient, loss = gradients_and_loss[..., :-1], gradients_and_loss[..., -1]
    inboxes = ((f_KnP[..., 1:], activation), (b_KnP[..., :-1], gradient), (b_KnP[..., -1], loss))
    sent = (f_KnP[..., :-1], f_KnP[..., 1:], activation), (b_KnP[..., 1:], b_KnP[..., :-1], gradient)
    activations, gradients = (placed.moves(*each) for each in sent)
    every, updates = np.arange(schedule.num_ops), np.flatnonzero(schedule.kind == Kind.U)
    data = placed.turns(f_KnP)
    phase_bounds, phase_of_updates = placed.phases(updates)
    names = np.stack([schedule.iteration, schedule.pipeline, schedule.microbatch], axis=1)
    return TickTable(
        workers=live,
        opcode_TR=placed.spread((every, schedule.kind + 1), empty=NOTHING),
        iteration_TR=placed.spread((every, schedule.iteration)),
        pipeline_TR=placed.spread((every, schedule.pipeline)),
        microbatch_TR=placed.spread((every, schedule.microbatch)),
        chunk_TR=placed.spread((every, schedule.chunk)),
        data_TR=placed.spread((f_KnP, data), (b_KnP, data), (w_KnP, data)),
        b_stash_TR=placed.spread((f_KnP, b_slots), (b_KnP, b_slots)),
        held_TR=placed.spread((f_KnP, b_and_w_slots), (b_KnP, b_and_w_slots), (w_KnP, b_and_w_slots)),
        w_stash_TR=placed.spread((b_KnP, w_slots), (w_KnP, w_slots)),
        inbox_TR=placed.spread(*inboxes),
        loss_TR=placed.spread((f_KnP[..., -1], loss)),
        own_slot_TR=placed.spread(*(placed.staying(*each) for each in sent)),
        data_Rn=placed.listed(f_KnP, data, names[f_KnP]),
        phase_bounds=phase_bounds,
        update_HR=placed.of_phases(phase_bounds, phase_of_updates, updates, schedule.iteration),
        update_chunk_HR=placed.of_phases(phase_bounds, phase_of_updates, updates, schedule.chunk),
        activations=replace(activations, num_slots=_count(activation)),
        gradients=replace(gradients, num_slots=max(_count(gradient), _count(loss))),
        num_b_stash=_count(b_slots),
        num_held=_count(b_and_w_slots),
        num_w_stash=_count(w_slots),
    )


@dataclass(frozen=True, eq=False)
class _Placed:
    """A schedule's ops with their ticks and mesh rows. Methods take op indices in arrays of any shape."""

    tick_n: np.ndarray
    row_n: np.ndarray
    num_ticks: int
    num_live: int

    def spread(self, *columns: tuple[np.ndarray, np.ndarray], empty: int = NONE) -> np.ndarray:
        """Scatters values by tick and row into a table, int32[T, R]."""
        table_TR = np.full((self.num_ticks, self.num_live), empty, np.int32)
        for ops, values in columns:
            table_TR[self.tick_n[ops], self.row_n[ops]] = values
        return table_TR

    def slots(self, writers: np.ndarray, readers: np.ndarray) -> np.ndarray:
        """Allocates a slot on each reader's worker, occupied from the writer's tick to the reader's tick."""
        rows, since, until = self.row_n[readers], self.tick_n[writers], self.tick_n[readers]
        assert (since < until).all(), "an op runs before what it reads is there"
        flat = interval_slots(rows.ravel(), since.ravel(), until.ravel(), self.num_live)
        return flat.reshape(readers.shape)

    def moves(self, writers: np.ndarray, readers: np.ndarray, slots: np.ndarray) -> Moves:
        """Builds the messages from writers to those readers that are on other workers."""
        sent = self.row_n[writers] != self.row_n[readers]
        ticks, senders, receivers = self.tick_n[writers[sent]], self.row_n[writers[sent]], self.row_n[readers[sent]]
        return move(ticks, senders, receivers, slots[sent], self.num_ticks, self.num_live)

    def staying(self, writers: np.ndarray, readers: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Selects the writers whose readers are on the same worker, with their slots."""
        stays = self.row_n[writers] == self.row_n[readers]
        return writers[stays], slots[stays]

    def turns(self, ops: np.ndarray) -> np.ndarray:
        """Returns the index of each op's micro-batch within the op's row, ``[K, n, P]``.

        A row's micro-batches are numbered in the order of their first op. A micro-batch counts once, even if the row
        runs several of its chunks.
        """
        row, tick = self.row_n[ops].ravel(), self.tick_n[ops].ravel()
        microbatch = np.arange(ops.size) // ops.shape[-1]
        order = np.lexsort((tick, row))
        key = row[order] * (ops.size // ops.shape[-1]) + microbatch[order]
        _, first, met = np.unique(key, return_index=True, return_inverse=True)
        is_first = np.zeros(len(key), bool)
        is_first[first] = True
        count = np.cumsum(is_first)
        index = count[first] - 1
        before = (count - is_first)[np.searchsorted(row[order], row[order])]
        data_index = np.empty(len(key), np.int64)
        data_index[order] = index[met] - before
        return data_index.reshape(ops.shape)

    def listed(self, ops: np.ndarray, places: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Stores three values per micro-batch at the given places of each row, int32[R, n, 3], padded with ``NONE``."""
        list_Rn = np.full((self.num_live, _count(places), 3), NONE, np.int32)
        list_Rn[self.row_n[ops], places] = values
        return list_Rn

    def phases(self, updates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the phase bounds, int32[H + 1], and the phase of each U. Every tick that has Us ends a phase."""
        last_ticks, phase = np.unique(self.tick_n[updates], return_inverse=True)
        assert last_ticks[-1] == self.num_ticks - 1, "an op after all updates"
        return np.append(0, last_ticks + 1).astype(np.int32), phase

    def of_phases(
        self, phase_bounds: np.ndarray, phase: np.ndarray, updates: np.ndarray, values_n: np.ndarray
    ) -> np.ndarray:
        """Scatters values of Us by phase and row into a table, int32[H, R]."""
        table_HR = np.full((len(phase_bounds) - 1, self.num_live), NONE, np.int32)
        table_HR[phase, self.row_n[updates]] = values_n[updates]
        return table_HR


def _count(slots: np.ndarray) -> int:
    return int(slots.max(initial=-1)) + 1


class SlotBytes(NamedTuple):
    """Bytes in one slot, by kind, on one worker.

    In terms of ``Costs``, the F-stash is ``stash_for_b + stash_for_b_and_w``, and the W-stash is
    ``stash_for_b_and_w + stash_for_w``.

    Attributes:
        stash_for_b: values that F keeps for B only.
        stash_for_b_and_w: values that F keeps for W, which B may read too.
        stash_for_w: values that B keeps for W.
        activation: message to the next stage.
        gradient: message to the previous stage; also the size of the loss gradient.
    """

    stash_for_b: int
    stash_for_b_and_w: int
    stash_for_w: int
    activation: int = 0
    gradient: int = 0


class LiveBytes(NamedTuple):
    """Peak of the live bytes in each worker's slots, between ticks and within ticks.

    Attributes:
        between_ticks_R: int64[R], peak after messages have moved and before the next ops run.
        within_ticks_R: int64[R], peak while ops run, including their inputs and outputs.
    """

    between_ticks_R: np.ndarray
    within_ticks_R: np.ndarray


def live_bytes(table: TickTable, sizes: SlotBytes) -> LiveBytes:
    """Computes the peak of the live bytes in each worker's slots while a table runs."""
    is_f, is_b, is_w = (table.opcode_TR == kind + 1 for kind in (Kind.F, Kind.B, Kind.W))
    has_stash, reads = table.held_TR != NONE, table.inbox_TR != NONE
    written_TR = is_f * has_stash * (sizes.stash_for_b + sizes.stash_for_b_and_w) + is_b * sizes.stash_for_w
    written_TR += (table.loss_TR != NONE) * sizes.gradient
    written_TR += (table.own_slot_TR != NONE) * (is_f * sizes.activation + is_b * sizes.gradient)
    read_TR = is_b * sizes.stash_for_b + is_w * (sizes.stash_for_b_and_w + sizes.stash_for_w)
    read_TR += (is_f & reads) * sizes.activation + (is_b & reads) * sizes.gradient
    came_TR = _messages(table.activations) * sizes.activation + _messages(table.gradients) * sizes.gradient
    after_TR = np.cumsum(written_TR + came_TR - read_TR, axis=0)
    return LiveBytes(after_TR.max(axis=0, initial=0), (after_TR - came_TR + read_TR).max(axis=0, initial=0))


def allocated_bytes(table: TickTable, sizes: SlotBytes) -> int:
    """Computes the bytes that a program allocates for slots on every worker, sized for the most demanding worker."""
    counts = (
        table.num_b_stash,
        table.num_held,
        table.num_w_stash,
        table.activations.num_slots,
        table.gradients.num_slots,
    )
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _messages(moves: Moves) -> np.ndarray:
    """Counts the messages that every worker receives at the end of each tick, int64[T, R]."""
    return (moves.slot_TQR != NONE).sum(axis=1)
