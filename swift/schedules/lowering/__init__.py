"""Lowering: from a schedule to the tick table that one SPMD program interprets, with its messages and buffers.

``ticks`` assigns ops to ticks, by a ``beam`` search; ``messages`` turns messages into permutations and allocates slots;
``lower`` fills the ``tick_table``; ``buffer_sizes`` sums its memory.
"""

from swift.schedules.lowering.beam import Step, beam_search
from swift.schedules.lowering.buffer_sizes import HeldBytes, SlotBytes, allocated_bytes, held_bytes
from swift.schedules.lowering.lower import lower
from swift.schedules.lowering.messages import Permutation
from swift.schedules.lowering.tick_table import NOTHING, TableShape, TickTable, common_shape
from swift.schedules.lowering.ticks import COST_PER_TICK, NONE, FixedOrder, Lines, assign_ticks, lockstep_period

__all__ = [
    "COST_PER_TICK",
    "NONE",
    "NOTHING",
    "FixedOrder",
    "HeldBytes",
    "Lines",
    "Permutation",
    "SlotBytes",
    "Step",
    "TableShape",
    "TickTable",
    "allocated_bytes",
    "assign_ticks",
    "beam_search",
    "common_shape",
    "held_bytes",
    "lockstep_period",
    "lower",
]
