"""Prefetching: as many samples ahead of their use as the workers make at once and the memory allows."""

from dataclasses import replace

from swift.data.pipeline.operators import Stack
from swift.data.pipeline.optimizer.cost import Resources
from swift.data.pipeline.optimizer.profile import InputProfile
from swift.data.pipeline.plan import InputPlan

_EACH = 2
"""Samples that are ready for each thread that makes them: one is taken while the next is made."""
_SHARE = 8
"""The share of the memory that samples ahead may take is one over this."""


def add_prefetch(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with a number of samples ahead."""
    if not plan.num_threads and not plan.num_processes:
        return replace(plan, reasons=(*plan.reasons, "prefetch: none without workers"))
    size = profile.operators[-1].bytes_out if profile.operators else profile.source.bytes_out
    if plan.num_packed:
        size = 8.0 * (plan.num_packed + 1)
    for level in plan.pipeline.levels:
        size *= level.group.size if isinstance(level.group, Stack) else 1
    wanted = _EACH * max(1, plan.num_threads) * max(1, plan.num_processes)
    fitting = int(resources.memory_bytes / _SHARE / max(size, 1.0))
    num_ahead = max(1, min(wanted, fitting))
    reason = f"prefetch: {num_ahead} samples of {size / 1e6:.3g} MB ahead of their use"
    return replace(plan, num_ahead=num_ahead, reasons=(*plan.reasons, reason))
