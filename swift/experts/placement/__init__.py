"""Expert placement: which expert each slot of each rank holds, decided in every iteration from popularity.

``policy`` defines the interface of policies, the steps that they share, and the static policy; ``symi``, ``flexmoe``
and ``packed`` contain the other policies. ``replicas`` counts and lays out replicas, and ``trial`` checks a user's
policy before a run. ``library`` provides placement for NumPy arrays, without a trainer.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.experts.placement.flexmoe import FlexMoE, FlexMoEState
    from swift.experts.placement.library import check_loads, place_experts, rank_loads, split_tokens
    from swift.experts.placement.packed import MinMax, Packed
    from swift.experts.placement.policy import (
        PlacementPolicy,
        PolicyState,
        Static,
        check_slots,
        place_contiguously,
        uniform_placement,
    )
    from swift.experts.placement.replicas import (
        changed_slots,
        contiguous,
        load_imbalance,
        placement_error,
        replica_counts,
        replica_error,
    )
    from swift.experts.placement.symi import Symi
    from swift.experts.placement.trial import check_policy

_MODULES = {
    "swift.experts.placement.flexmoe": ["FlexMoE", "FlexMoEState"],
    "swift.experts.placement.library": ["check_loads", "place_experts", "rank_loads", "split_tokens"],
    "swift.experts.placement.packed": ["MinMax", "Packed"],
    "swift.experts.placement.policy": [
        "PlacementPolicy",
        "PolicyState",
        "Static",
        "check_slots",
        "place_contiguously",
        "uniform_placement",
    ],
    "swift.experts.placement.replicas": [
        "changed_slots",
        "contiguous",
        "load_imbalance",
        "replica_counts",
        "replica_error",
        "placement_error",
    ],
    "swift.experts.placement.symi": ["Symi"],
    "swift.experts.placement.trial": ["check_policy"],
}
__all__ = [
    "FlexMoE",
    "FlexMoEState",
    "MinMax",
    "Packed",
    "PlacementPolicy",
    "PolicyState",
    "Static",
    "Symi",
    "changed_slots",
    "check_loads",
    "check_policy",
    "check_slots",
    "contiguous",
    "load_imbalance",
    "place_contiguously",
    "place_experts",
    "placement_error",
    "rank_loads",
    "replica_counts",
    "replica_error",
    "split_tokens",
    "uniform_placement",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
