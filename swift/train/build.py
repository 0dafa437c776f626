"""Derives experiments from others: for the ranks that are left, and for processes that only store states."""

from dataclasses import replace

from swift.config.experiment import Experiment
from swift.experts.capacity.exact import exact_slots


def with_num_ranks(experiment: Experiment, num_ranks: int) -> Experiment:
    """Returns the same experiment on fewer expert ranks, with a slot for every class, without failures or snapshots.

    It computes the same sums, but with fewer slots more tokens are dropped, unless ``ExpertConfig.capacity_factor`` is
    None.
    """
    if num_ranks == experiment.topology.num_expert_ranks:
        return experiment
    classes, is_exact = experiment.experts.num_classes, experiment.experts.is_exact
    least = exact_slots(classes, num_ranks) if is_exact else -(-classes // num_ranks)
    slots = max(experiment.experts.slots_per_rank, least)
    return replace(
        experiment,
        topology=replace(experiment.topology, num_expert_ranks=num_ranks),
        experts=replace(experiment.experts, slots_per_rank=slots),
        checkpoint=replace(experiment.checkpoint, snapshot_every=0, snapshot_experts_per_layer="all"),
        failures=(),
    )


def on_storage_mesh(experiment: Experiment) -> Experiment:
    """Returns the same experiment with an attention kernel for any device; states do not depend on the kernel."""
    return replace(experiment, attention="auto")
