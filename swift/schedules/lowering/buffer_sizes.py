"""Bytes in the slots of a tick table: live at any time, and allocated by a program.

A stash occupies its slot from its op's tick to the tick of its last reader; a message, from the tick after the one at
whose end it moves. While an op runs, its inputs and outputs coexist: B holds its own stash and what F keeps for W, and
writes the W-stash beside them. ``peak_memory`` instead lets B overwrite its input with the W-stash, so the two differ
within ticks, by at most the smaller of the two stashes; between ticks no B runs, and they agree on stashes.

T: ticks, R: live workers in mesh order.
"""

from typing import NamedTuple

import numpy as np

from swift.schedules.lowering.messages import NONE, Moves
from swift.schedules.lowering.tick_table import TickTable
from swift.schedules.ops import Kind


class SlotBytes(NamedTuple):
    """Bytes of one slot of each kind, on one worker.

    In terms of ``Costs``, the F-stash is ``b_stash + held`` and the W-stash is ``held + w_stash``.

    Attributes:
        b_stash: values that F keeps for B only.
        held: values that F keeps for W.
        w_stash: values that B keeps for W.
        activation, gradient: message to the next stage, and to the previous one; the loss's gradient counts as one.
    """

    b_stash: int
    held: int
    w_stash: int
    activation: int = 0
    gradient: int = 0


class HeldBytes(NamedTuple):
    """Peak of the live bytes in each worker's slots.

    Attributes:
        between_ticks_R: int64[R], peak after messages have moved and before the next ops run.
        within_ticks_R: int64[R], peak while ops run, including their inputs and outputs.
    """

    between_ticks_R: np.ndarray
    within_ticks_R: np.ndarray


def held_bytes(table: TickTable, sizes: SlotBytes) -> HeldBytes:
    """Computes the peaks of the live bytes in the slots while a table runs."""
    is_f, is_b, is_w = (table.opcode_TR == kind + 1 for kind in (Kind.F, Kind.B, Kind.W))
    kept, reads = table.held_TR != NONE, table.inbox_TR != NONE
    written_TR = is_f * kept * (sizes.b_stash + sizes.held) + is_b * sizes.w_stash
    written_TR += (table.loss_TR != NONE) * sizes.gradient
    written_TR += (table.own_slot_TR != NONE) * (is_f * sizes.activation + is_b * sizes.gradient)
    read_TR = is_b * sizes.b_stash + is_w * (sizes.held + sizes.w_stash)
    read_TR += (is_f & reads) * sizes.activation + (is_b & reads) * sizes.gradient
    came_TR = _messages(table.activations) * sizes.activation + _messages(table.gradients) * sizes.gradient
    after_TR = np.cumsum(written_TR + came_TR - read_TR, axis=0)
    return HeldBytes(after_TR.max(axis=0, initial=0), (after_TR - came_TR + read_TR).max(axis=0, initial=0))


def allocated_bytes(table: TickTable, sizes: SlotBytes) -> int:
    """Bytes that a program allocates for slots on every worker: as many slots as the worker with the most needs."""
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
