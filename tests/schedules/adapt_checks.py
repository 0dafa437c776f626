"""What holds of a plan after any failure, however many runs of blocks a stage holds."""

from dataclasses import replace

from hypothesis import Phase

from swift.schedules.adapt.choice import adapt, rerouted, with_roles_moved
from swift.schedules.rules import violations
from swift.topology import Topology

UNSHRUNK = (Phase.explicit, Phase.generate)
"""For examples drawn by a seed: a smaller seed is no smaller example, and to look for one takes minutes."""


def check_choice(work, failed, planner_period, seed):
    """That the choice is a valid plan of the same work, and no worse than each other way; returns it."""
    plan = adapt(work, failed)
    assert not violations(plan.schedule)
    assert sum(plan.schedule.problem.microbatches) == work.problem.total_microbatches
    assert plan.schedule.problem.memory_limit == work.problem.memory_limit
    others = [rerouted(work, failed).period, with_roles_moved(work, failed).period]
    others.append(planner_period(whole_pipelines(work, failed)))
    assert plan.period <= min(others) * (1 + 1e-6), (seed, plan.mode)
    return plan


def whole_pipelines(work, failed):
    """As many whole pipelines as there are survivors for, which share the micro-batches."""
    D, P = work.problem.num_pipelines, work.problem.num_stages
    number = (D * P - len(failed)) // P
    each, more = divmod(work.problem.total_microbatches, number)
    shares = tuple(each + (d < more) for d in range(number))
    holders = work.problem.stage_of_chunk[:number]
    return replace(work.problem, topology=Topology(number, P), num_microbatches=shares, stage_of_chunk=holders)
