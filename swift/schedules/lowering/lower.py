"""Lowering of a schedule to the table that one SPMD program interprets, tick by tick.

T: ticks, R: live workers in mesh order, H: phases, n: ops of a schedule.
"""

from dataclasses import dataclass, replace

import numpy as np

from swift.schedules.lowering.messages import NONE, Moves, interval_slots, move
from swift.schedules.lowering.tick_table import NOTHING, TickTable
from swift.schedules.lowering.ticks import assign_ticks
from swift.schedules.ops import Kind
from swift.schedules.schedule import Schedule


def lower(schedule: Schedule, tick_n: np.ndarray | None = None) -> TickTable:
    """Makes the tick table of a valid schedule; workers keep their order of ops.

    Without decoupling, a gradient still moves right after its B, although no op reads it before the end of W.

    Args:
        schedule: schedule to lower.
        tick_n: int64[n], tick of every op; by default those of ``assign_ticks``.
    """
    problem, P = schedule.problem, schedule.problem.num_stages
    tick_n = assign_ticks(schedule) if tick_n is None else tick_n
    live = problem.topology.live_workers(problem.failed)
    row_of = np.full(problem.num_pipelines * P, NONE)
    row_of[[d * P + p for d, p in live]] = np.arange(len(live))
    placed = _Placed(tick_n, row_of[schedule.worker], int(tick_n.max()) + 1, len(live))
    f_KDMP, b_KDMP, w_KDMP = schedule.row_3KDMP
    b_stash, held, w_stash = (placed.slots(*pair) for pair in ((f_KDMP, b_KDMP), (f_KDMP, w_KDMP), (b_KDMP, w_KDMP)))
    activation = placed.slots(f_KDMP[..., :-1], f_KDMP[..., 1:])
    gradient = placed.slots(b_KDMP[..., 1:], b_KDMP[..., :-1])
    loss = placed.slots(f_KDMP[..., -1], b_KDMP[..., -1])
    inboxes = ((f_KDMP[..., 1:], activation), (b_KDMP[..., :-1], gradient), (b_KDMP[..., -1], loss))
    gradients = placed.moves(b_KDMP[..., 1:], b_KDMP[..., :-1], gradient)
    every, updates = np.arange(schedule.num_ops), np.flatnonzero(schedule.kind == Kind.U)
    data = placed.turns(f_KDMP)
    phase_bounds, update_HR = placed.phases(updates, schedule.iteration[updates])
    names = np.stack([schedule.iteration, schedule.pipeline, schedule.microbatch], axis=1)
    return TickTable(
        workers=live,
        opcode_TR=placed.spread((every, schedule.kind + 1), empty=NOTHING),
        iteration_TR=placed.spread((every, schedule.iteration)),
        pipeline_TR=placed.spread((every, schedule.pipeline)),
        microbatch_TR=placed.spread((every, schedule.microbatch)),
        data_TR=placed.spread((f_KDMP, data), (b_KDMP, data), (w_KDMP, data)),
        b_stash_TR=placed.spread((f_KDMP, b_stash), (b_KDMP, b_stash)),
        held_TR=placed.spread((f_KDMP, held), (b_KDMP, held), (w_KDMP, held)),
        w_stash_TR=placed.spread((b_KDMP, w_stash), (w_KDMP, w_stash)),
        inbox_TR=placed.spread(*inboxes),
        loss_TR=placed.spread((f_KDMP[..., -1], loss)),
        data_Rn=placed.listed(f_KDMP, data, names[f_KDMP]),
        phase_bounds=phase_bounds,
        update_HR=update_HR,
        activations=placed.moves(f_KDMP[..., :-1], f_KDMP[..., 1:], activation),
        gradients=replace(gradients, num_slots=max(gradients.num_slots, _count(loss))),
        num_b_stash=_count(b_stash),
        num_held=_count(held),
        num_w_stash=_count(w_stash),
    )


@dataclass(frozen=True, eq=False)
class _Placed:
    """Ops of a schedule with their ticks and rows; methods take arrays of op numbers, of any shape."""

    tick_n: np.ndarray
    row_n: np.ndarray
    num_ticks: int
    num_live: int

    def spread(self, *columns: tuple[np.ndarray, np.ndarray], empty: int = NONE) -> np.ndarray:
        """Scatters values of ops into a table, int32[T, R]."""
        table_TR = np.full((self.num_ticks, self.num_live), empty, np.int32)
        for ops, values in columns:
            table_TR[self.tick_n[ops], self.row_n[ops]] = values
        return table_TR

    def slots(self, writers: np.ndarray, readers: np.ndarray) -> np.ndarray:
        """Allocates slots on the readers' workers, each occupied from its writer's tick to its reader's."""
        rows, since, until = self.row_n[readers], self.tick_n[writers], self.tick_n[readers]
        assert (since < until).all(), "an op runs before what it reads is there"
        flat = interval_slots(rows.ravel(), since.ravel(), until.ravel(), self.num_live)
        return flat.reshape(readers.shape)

    def moves(self, writers: np.ndarray, readers: np.ndarray, slots: np.ndarray) -> Moves:
        """Makes the messages from the writers to the readers."""
        ticks, senders, receivers = self.tick_n[writers], self.row_n[writers], self.row_n[readers]
        return move(ticks.ravel(), senders.ravel(), receivers.ravel(), slots.ravel(), self.num_ticks, self.num_live)

    def turns(self, ops: np.ndarray) -> np.ndarray:
        """Number of these ops that the same row ran before, for each op."""
        row, tick = self.row_n[ops].ravel(), self.tick_n[ops].ravel()
        order = np.lexsort((tick, row))
        turn = np.empty(len(order), np.int64)
        turn[order] = np.arange(len(order)) - np.searchsorted(row[order], row[order])
        return turn.reshape(ops.shape)

    def listed(self, ops: np.ndarray, places: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Lists three numbers per op for every row, int32[R, most ops of a row, 3]."""
        list_Rn = np.full((self.num_live, _count(places), 3), NONE, np.int32)
        list_Rn[self.row_n[ops], places] = values
        return list_Rn

    def phases(self, updates: np.ndarray, iterations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the bounds of the phases that end with these Us, int32[H + 1], and their iterations, int32[H, R]."""
        last_ticks, phase = np.unique(self.tick_n[updates], return_inverse=True)
        assert last_ticks[-1] == self.num_ticks - 1, "an op after all updates"
        update_HR = np.full((len(last_ticks), self.num_live), NONE, np.int32)
        update_HR[phase, self.row_n[updates]] = iterations
        return np.append(0, last_ticks + 1).astype(np.int32), update_HR


def _count(slots: np.ndarray) -> int:
    return int(slots.max(initial=-1)) + 1
