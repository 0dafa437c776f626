"""All passes one after the other, and what else could have been chosen."""

from dataclasses import dataclass, replace

from swift.data.pipeline.optimizer.cache import add_cache
from swift.data.pipeline.optimizer.cost import Resources, predict
from swift.data.pipeline.optimizer.offload import add_offload
from swift.data.pipeline.optimizer.prefetch import add_prefetch
from swift.data.pipeline.optimizer.profile import InputProfile, profile_input
from swift.data.pipeline.optimizer.reorder import reorder
from swift.data.pipeline.optimizer.workers import add_workers
from swift.data.pipeline.pipeline import Pipeline
from swift.data.pipeline.plan import InputPlan, plain_plan

CHECK_EVERY = 1000
"""Number of samples of which one is compared with that of the plain order."""
PASSES = (reorder, add_cache, add_workers, add_offload, add_prefetch)


@dataclass(frozen=True)
class Alternative:
    """A plan that could be chosen.

    Attributes:
        name: what it does, in words.
        plan: the plan.
        seconds: predicted seconds of one core for all epochs.
    """

    name: str
    plan: InputPlan
    seconds: float


def plan_input(
    pipeline: Pipeline, resources: Resources | None = None, profile: InputProfile | None = None
) -> InputPlan:
    """Chooses how a pipeline runs; its samples are the same as those of ``plain_plan``.

    Args:
        pipeline: pipeline.
        resources: what the plan may use.
        profile: profile of the pipeline; made here unless given.

    Raises:
        SettingError: the source has no records.
        DataError: an operator raises on one of the first records.
    """
    used, seen = resources or Resources(), profile or profile_input(pipeline)
    plan = plain_plan(pipeline)
    for improve in PASSES:
        plan = improve(plan, seen, used)
    return replace(plan, check_every=CHECK_EVERY)


def alternatives(pipeline: Pipeline, resources: Resources, profile: InputProfile) -> list[Alternative]:
    """Returns the plain plan, those with a single pass, and the chosen one, with what each is predicted to cost."""
    plain, chosen = plain_plan(pipeline), plan_input(pipeline, resources, profile)
    plans = {
        "as written": plain,
        "reordered": replace(reorder(plain, profile, resources), cache=None),
        "as written, with a cache": add_cache(plain, profile, resources),
        "chosen": chosen,
    }
    return [
        Alternative(name, plan, predict(plan, profile).total_s(resources.num_epochs)) for name, plan in plans.items()
    ]
