"""The GPT of the experiments, with dense layers and mixtures of experts.

``gpt`` is the forward pass, cut where pipelines cut, and ``cut`` says where; ``modules`` are its parts;
``parameter_groups`` packs parameters into the flat vectors that the optimizer shares; ``reference_model`` is the
single-device oracle.
"""

from swift.models.config import MODEL_SIZES, ModelConfig, model_size
from swift.models.cut import Cut, cut_by_costs, make_cut
from swift.models.gpt import BLOCK_GROUPS, GPT, MoeFunction, StackedWeights, Weights
from swift.models.parameter_groups import Group
from swift.models.reference_model import plain_logits, plain_sums

__all__ = [
    "BLOCK_GROUPS",
    "GPT",
    "MODEL_SIZES",
    "Cut",
    "Group",
    "ModelConfig",
    "MoeFunction",
    "StackedWeights",
    "Weights",
    "cut_by_costs",
    "make_cut",
    "model_size",
    "plain_logits",
    "plain_sums",
]
