"""The optimizer: a profile of the first records, the predicted time of a plan, and passes that choose a better one.

Each pass is a file and takes a plan, a profile and what may be used: ``reorder``, ``cache``, ``workers``, ``offload``,
``prefetch``.
"""

from swift.data.pipeline.optimizer.cost import Resources
from swift.data.pipeline.optimizer.offload import profile_hosts
from swift.data.pipeline.optimizer.passes import alternatives, plan_input
from swift.data.pipeline.optimizer.profile import HostsProfile, InputProfile, OperatorProfile, profile_input

__all__ = [
    "HostsProfile",
    "InputProfile",
    "OperatorProfile",
    "Resources",
    "alternatives",
    "plan_input",
    "profile_hosts",
    "profile_input",
]
