"""Plans that are ready before a failure.

``normalize`` reduces problems to failure counts, ``moved_roles`` chooses which roles stay empty, ``holders`` says who
holds what, ``store`` keeps plans on disk, and ``json_format`` describes a schedule as a JSON document.
"""

from swift.schedules.plans.holders import OWN_CUT, BlockHolders
from swift.schedules.plans.json_format import COST_NAMES, document
from swift.schedules.plans.moved_roles import moves_to_spread
from swift.schedules.plans.normalize import (
    Move,
    Normalized,
    after_moves,
    canonical,
    denormalize,
    failure_counts,
    moves,
    normalize,
    num_plans,
    plans_to_prepare,
    spread,
)
from swift.schedules.plans.store import DamagedPlanError, PlanStore, plan_document, read_plan

__all__ = [
    "COST_NAMES",
    "OWN_CUT",
    "BlockHolders",
    "DamagedPlanError",
    "Move",
    "Normalized",
    "PlanStore",
    "after_moves",
    "canonical",
    "denormalize",
    "document",
    "failure_counts",
    "moves",
    "moves_to_spread",
    "normalize",
    "num_plans",
    "plan_document",
    "plans_to_prepare",
    "read_plan",
    "spread",
]
