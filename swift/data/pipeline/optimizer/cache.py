"""Caching: samples are kept where making them again costs more than reading them, before the first random operator."""

from dataclasses import replace

from swift.data.pipeline.optimizer.cost import Resources, cheapest_cache, predict
from swift.data.pipeline.optimizer.profile import InputProfile
from swift.data.pipeline.plan import InputPlan


def add_cache(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with the cache that costs least, which may be none."""
    best, seconds = cheapest_cache(plan, profile, resources)
    without = predict(replace(plan, cache=None), profile).total_s(resources.num_epochs)
    if best.cache is None:
        why = f"samples cannot be kept: {next(iter(profile.unkept.values()))}" if profile.unkept else ""
        why = why or f"keeping samples does not pay within {resources.num_epochs:g} epochs, or they do not fit"
        return replace(plan, cache=None, reasons=(*plan.reasons, f"cache: none; {why}"))
    after = best.orders[0][best.cache.num_elements - 1] if best.cache.num_elements else "the source"
    size = predict(best, profile).kept_bytes
    reason = (
        f"cache: in {'memory' if best.cache.kind == 'memory' else 'files'} after {after}, {size / 1e6:,.1f} MB: "
        f"{seconds:.3g} s instead of {without:.3g} s of one core for {resources.num_epochs:g} epochs"
    )
    return replace(best, reasons=(*plan.reasons, reason))
