"""Mixture-of-experts layers: routing, dispatch to slots, replica placement, and an optimizer decoupled from placement.

Start with ``layer``, which runs one rank's tokens through the experts of all ranks, and ``weight_exchange``, which
fills every slot with the weights of the expert placed there. ``routers`` choose experts, ``capacity`` decides which
of these tokens are served, and ``grouped_matmul`` multiplies their rows by the experts' weights; ``placement`` decides
which expert each slot holds. ``state_layouts`` defines where the optimizer state lives. ``optimizer`` builds the optax
transformation that updates it, and ``elementwise`` checks that the transformation works on slices. ``dropless`` serves
all tokens, without a capacity limit; ``reference`` is the test oracle.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity, SlotCapacity
    from swift.experts.dropless import sorted_moe
    from swift.experts.layer import expert_parallel_moe
    from swift.experts.optimizer import CustomOptimizer, CustomSchedule, OptimizerConfig, make_optimizer
    from swift.experts.reference import dropless_moe, reference_moe
    from swift.experts.routers import ExpertChoice, NoisyTopK, Sinkhorn, TopK
    from swift.experts.routing import Number, Router, Routing
    from swift.experts.state_layouts import Decoupled, Layout
    from swift.experts.weight_exchange import collect, materialize, to_slices

_MODULES = {
    "swift.experts.config": ["ExpertConfig", "SlotCapacity", "RankCapacity", "ExactCapacity"],
    "swift.experts.dropless": ["sorted_moe"],
    "swift.experts.weight_exchange": ["collect", "materialize", "to_slices"],
    "swift.experts.layer": ["expert_parallel_moe"],
    "swift.experts.optimizer": ["OptimizerConfig", "CustomOptimizer", "CustomSchedule", "make_optimizer"],
    "swift.experts.reference": ["dropless_moe", "reference_moe"],
    "swift.experts.routers": ["ExpertChoice", "NoisyTopK", "Sinkhorn", "TopK"],
    "swift.experts.routing": ["Number", "Router", "Routing"],
    "swift.experts.state_layouts": ["Decoupled", "Layout"],
}
__all__ = [
    "CustomOptimizer",
    "CustomSchedule",
    "Decoupled",
    "ExactCapacity",
    "ExpertChoice",
    "ExpertConfig",
    "Layout",
    "NoisyTopK",
    "Number",
    "OptimizerConfig",
    "RankCapacity",
    "Router",
    "Routing",
    "Sinkhorn",
    "SlotCapacity",
    "TopK",
    "collect",
    "dropless_moe",
    "expert_parallel_moe",
    "make_optimizer",
    "materialize",
    "reference_moe",
    "sorted_moe",
    "to_slices",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
