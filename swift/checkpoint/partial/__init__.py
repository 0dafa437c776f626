"""Partial checkpoints (MoC-System).

The division of a state into a dense part and experts, the choice of the experts that a checkpoint saves, and the
proportion of lost tokens that this costs.
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
