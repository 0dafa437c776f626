"""A schedule as the table that one SPMD program interprets, tick by tick.

T: ticks, Q: rounds of a tick, R: live workers in mesh order, n: ops of a schedule.
"""

from dataclasses import dataclass, replace

import numpy as np

from swift.schedules.messages import NONE, Moves, interval_slots, move
from swift.schedules.schedule import Schedule
from swift.schedules.ticks import assign_ticks
from swift.topology import Worker

NOTHING = 0
"""The opcode of a worker that idles; that of an op is its kind plus one."""


@dataclass(frozen=True, eq=False)
class TickTable:
    """What every live worker does in every tick; ``NONE`` where a field does not apply.

    In a tick a worker first runs its op, which may read any slot that was written in an earlier tick. Then the messages
    move: what F made to the inbox for activations of the next stage, what B made to that for gradients of the stage
    before. A slot that an op reads may be written again from the end of its tick on.

    Attributes:
        workers: the live workers: the rows of the mesh axis ``worker``.
        opcode_TR: int32, ``NOTHING`` or ``Kind`` + 1.
        iteration_TR, pipeline_TR, microbatch_TR: int32, names of the op: what data it needs; for U the worker's own
            pipeline and no micro-batch.
        f_stash_TR: int32, the slot of the F-stash that F writes and B reads.
        w_stash_TR: int32, the slot of the W-stash that B writes and W reads.
        inbox_TR: int32, the slot that the op reads: for F, but for the first stage's, of the inbox for activations; for
            B of the one for gradients.
        loss_TR: int32, the slot of the inbox for gradients into which the last stage's F puts its loss's gradient.
        activations: the messages of F.
        gradients: the messages of B.
        num_f_stash, num_w_stash: slots that every worker needs.
    """

    workers: tuple[Worker, ...]
    opcode_TR: np.ndarray
    iteration_TR: np.ndarray
    pipeline_TR: np.ndarray
    microbatch_TR: np.ndarray
    f_stash_TR: np.ndarray
    w_stash_TR: np.ndarray
    inbox_TR: np.ndarray
    loss_TR: np.ndarray
    activations: Moves
    gradients: Moves
    num_f_stash: int
    num_w_stash: int

    @property
    def num_ticks(self) -> int:
        """T."""
        return len(self.opcode_TR)

    @property
    def num_rounds_T(self) -> np.ndarray:
        """int64[T]: collectives of every tick, those of both directions counted."""
        return self.activations.num_rounds_T + self.gradients.num_rounds_T


def lower(schedule: Schedule, tick_n: np.ndarray | None = None) -> TickTable:
    """The table of a valid schedule; workers keep their order of ops.

    Without decoupling a gradient moves after its B as it does otherwise, although nobody reads it before the end of W.

    Args:
        schedule: to be run.
        tick_n: int64[n], the ticks of its ops; None: those of ``assign_ticks``.
    """
    problem, P = schedule.problem, schedule.problem.num_stages
    tick_n = assign_ticks(schedule) if tick_n is None else tick_n
    live = problem.topology.live_workers(problem.failed)
    row_of = np.full(problem.num_pipelines * P, NONE)
    row_of[[d * P + p for d, p in live]] = np.arange(len(live))
    placed = _Placed(tick_n, row_of[schedule.worker], int(tick_n.max()) + 1, len(live))
    f_KDMP, b_KDMP, w_KDMP = schedule.row_3KDMP
    f_stash, w_stash = placed.slots(f_KDMP, b_KDMP), placed.slots(b_KDMP, w_KDMP)
    activation = placed.slots(f_KDMP[..., :-1], f_KDMP[..., 1:])
    gradient = placed.slots(b_KDMP[..., 1:], b_KDMP[..., :-1])
    loss = placed.slots(f_KDMP[..., -1], b_KDMP[..., -1])
    inboxes = ((f_KDMP[..., 1:], activation), (b_KDMP[..., :-1], gradient), (b_KDMP[..., -1], loss))
    gradients = placed.moves(b_KDMP[..., 1:], b_KDMP[..., :-1], gradient)
    every = np.arange(schedule.num_ops)
    return TickTable(
        workers=live,
        opcode_TR=placed.spread((every, schedule.kind + 1), empty=NOTHING),
        iteration_TR=placed.spread((every, schedule.iteration)),
        pipeline_TR=placed.spread((every, schedule.pipeline)),
        microbatch_TR=placed.spread((every, schedule.microbatch)),
        f_stash_TR=placed.spread((f_KDMP, f_stash), (b_KDMP, f_stash)),
        w_stash_TR=placed.spread((b_KDMP, w_stash), (w_KDMP, w_stash)),
        inbox_TR=placed.spread(*inboxes),
        loss_TR=placed.spread((f_KDMP[..., -1], loss)),
        activations=placed.moves(f_KDMP[..., :-1], f_KDMP[..., 1:], activation),
        gradients=replace(gradients, num_slots=max(gradients.num_slots, _count(loss))),
        num_f_stash=_count(f_stash),
        num_w_stash=_count(w_stash),
    )


@dataclass(frozen=True, eq=False)
class _Placed:
    """The ops of a schedule, by tick and row; ops are given as arrays of their numbers, of any shape."""

    tick_n: np.ndarray
    row_n: np.ndarray
    num_ticks: int
    num_rows: int

    def spread(self, *columns: tuple[np.ndarray, np.ndarray], empty: int = NONE) -> np.ndarray:
        """int32[T, R]: the values of some ops."""
        table_TR = np.full((self.num_ticks, self.num_rows), empty, np.int32)
        for ops, values in columns:
            table_TR[self.tick_n[ops], self.row_n[ops]] = values
        return table_TR

    def slots(self, writers: np.ndarray, readers: np.ndarray) -> np.ndarray:
        """The slot of what is on its reader's worker from the tick of its writer to that of its reader."""
        rows, since, until = self.row_n[readers], self.tick_n[writers], self.tick_n[readers]
        assert (since < until).all(), "an op runs before what it reads is there"
        flat = interval_slots(rows.ravel(), since.ravel(), until.ravel(), self.num_rows)
        return flat.reshape(readers.shape)

    def moves(self, writers: np.ndarray, readers: np.ndarray, slots: np.ndarray) -> Moves:
        """The messages from the writers to the readers."""
        ticks, senders, receivers = self.tick_n[writers], self.row_n[writers], self.row_n[readers]
        return move(ticks.ravel(), senders.ravel(), receivers.ravel(), slots.ravel(), self.num_ticks, self.num_rows)


def _count(slots: np.ndarray) -> int:
    return int(slots.max(initial=-1)) + 1
