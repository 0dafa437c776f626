"""Bytes in the slots of a tick table: what is alive in them, and what a program allocates for them.

What an op keeps is in its slot from the op's tick to the tick of its last reader; a message is there from the tick
after the one at whose end it moves. While an op runs, what it reads and what it writes are both there: B holds its own
stash and what F keeps for W, and writes the W-stash beside them. ``peak_memory`` lets B write the W-stash over what it
reads, and so differs within ticks, by no more than the smaller of the two; between ticks there is no B that runs, and
for stashes both are the same.

T: ticks, R: live workers in mesh order.
"""

from typing import NamedTuple

import numpy as np

from swift.schedules.lowering.messages import NONE, Moves
from swift.schedules.lowering.tick_table import TickTable
from swift.schedules.ops import Kind


class SlotBytes(NamedTuple):
    """Bytes of one slot of each kind, on one worker.

    As ``Costs``, F's stash is ``b_stash + held`` and W's is ``held + w_stash``.

    Attributes:
        b_stash: what F keeps for B alone.
        held: what F keeps for W.
        w_stash: what B keeps for W.
        activation, gradient: a message to the next stage, and to the one before; the loss's gradient is kept as such.
    """

    b_stash: int
    held: int
    w_stash: int
    activation: int = 0
    gradient: int = 0


class HeldBytes(NamedTuple):
    """The most that is alive in the slots of every worker.

    Attributes:
        between_ticks_R: int64[R], after messages have moved and before the next ops: what waits.
        within_ticks_R: int64[R], while ops run, what they read and what they write included.
    """

    between_ticks_R: np.ndarray
    within_ticks_R: np.ndarray


def held_bytes(table: TickTable, sizes: SlotBytes) -> HeldBytes:
    """The peaks of what is alive in the slots while a table is run."""
    is_f, is_b, is_w = (table.opcode_TR == kind + 1 for kind in (Kind.F, Kind.B, Kind.W))
    kept, reads = table.held_TR != NONE, table.inbox_TR != NONE
    written_TR = is_f * kept * (sizes.b_stash + sizes.held) + is_b * sizes.w_stash
    written_TR += (table.loss_TR != NONE) * sizes.gradient
    read_TR = is_b * sizes.b_stash + is_w * (sizes.held + sizes.w_stash)
    read_TR += (is_f & reads) * sizes.activation + (is_b & reads) * sizes.gradient
    came_TR = _messages(table.activations) * sizes.activation + _messages(table.gradients) * sizes.gradient
    after_TR = np.cumsum(written_TR + came_TR - read_TR, axis=0)
    return HeldBytes(after_TR.max(axis=0, initial=0), (after_TR - came_TR + read_TR).max(axis=0, initial=0))


def allocated_bytes(table: TickTable, sizes: SlotBytes) -> int:
    """What a program that runs the table allocates for slots on every worker: as many as the worker with most needs."""
    counts = (
        table.num_b_stash,
        table.num_held,
        table.num_w_stash,
        table.activations.num_slots,
        table.gradients.num_slots,
    )
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _messages(moves: Moves) -> np.ndarray:
    """int64[T, R]: how many messages every worker receives at the end of a tick."""
    return (moves.slot_TQR != NONE).sum(axis=1)
