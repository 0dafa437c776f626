"""The optimizer: a profile of the first records, the predicted time of a plan, and passes that choose a better one.

Each pass is a file and takes a plan, a profile and what may be used: ``reorder``, ``cache``, ``workers``, ``prefetch``.
"""

from swift.data.pipeline.optimizer.cost import Cost, Resources, predict
from swift.data.pipeline.optimizer.passes import Alternative, alternatives, plan_input
from swift.data.pipeline.optimizer.profile import InputProfile, OperatorProfile, profile_input

__all__ = [
    "Alternative",
    "Cost",
    "InputProfile",
    "OperatorProfile",
    "Resources",
    "alternatives",
    "plan_input",
    "predict",
    "profile_input",
]
