"""The GPT of the experiments, with dense layers and mixtures of experts.

``gpt`` is the forward pass, cut where pipelines cut; ``modules`` are its parts; ``parameter_groups`` packs parameters
into the flat vectors that the optimizer shares; ``reference_model`` is the single-device oracle.
"""

from swift.models.config import MODEL_SIZES, ModelConfig, model_size
from swift.models.gpt import GPT, MoeFunction, Weights
from swift.models.parameter_groups import Group
from swift.models.reference_model import plain_logits, plain_sums

__all__ = [
    "GPT",
    "MODEL_SIZES",
    "Group",
    "ModelConfig",
    "MoeFunction",
    "Weights",
    "model_size",
    "plain_logits",
    "plain_sums",
]
