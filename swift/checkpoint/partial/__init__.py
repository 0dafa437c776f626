"""Partial checkpoints (MoC-System).

``expert_units`` divides a state into a dense part and experts, ``selection`` chooses the experts that a checkpoint
saves, and ``lost_tokens`` counts the tokens that a restore loses by it.
"""

from swift.checkpoint.partial.expert_units import Snapshot, StateSplit, Unit, by_name, shape_text
from swift.checkpoint.partial.lost_tokens import Tally, dynamic_k
from swift.checkpoint.partial.selection import (
    everything,
    first_turns,
    load_aware,
    next_turns,
    partial_bytes,
    sequential,
)

__all__ = [
    "Snapshot",
    "StateSplit",
    "Tally",
    "Unit",
    "by_name",
    "dynamic_k",
    "everything",
    "first_turns",
    "load_aware",
    "next_turns",
    "partial_bytes",
    "sequential",
    "shape_text",
]
