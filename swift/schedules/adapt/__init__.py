"""Plans after a failure, by what they cost: re-routing, moved roles, or pipelines of unequal length, cut anew.

``layouts`` says which blocks the survivors could hold, ``division`` how many micro-batches each pipeline takes and
where the remainder is re-routed, ``ordering`` in which order the ops run; ``moving`` says what has to be copied, and
``choice`` takes the best of all ways. ``payoff`` says whether moving blocks pays during a run.
"""

from swift.schedules.adapt.choice import (
    MODES,
    Adaptation,
    adapt,
    fault_free,
    recut,
    rerouted,
    with_roles_moved,
)
from swift.schedules.adapt.moving import relocate
from swift.schedules.adapt.payoff import MoveRule, Outages
from swift.schedules.adapt.work import BlockLayout, BlockProblem

__all__ = [
    "MODES",
    "Adaptation",
    "BlockLayout",
    "BlockProblem",
    "MoveRule",
    "Outages",
    "adapt",
    "fault_free",
    "recut",
    "relocate",
    "rerouted",
    "with_roles_moved",
]
