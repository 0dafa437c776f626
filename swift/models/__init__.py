"""Decoder models with dense layers and mixtures of experts: GPT-2's architecture and those used by open models today.

``config`` defines the shape of a model, and named shapes; ``cuts`` divides its blocks into stages and chunks. ``gpt``
is the forward pass, split into functions at the points where pipelines cut. It uses ``attention`` (with
``attention_kernels`` and ``rope``), the other ``modules``, and ``losses``, which never holds all logits at once;
``vocabulary`` has the sharded embedding and head. ``own_block`` checks a user's modules. ``parameters`` packs
parameters into the flat vectors that the optimizer slices, and draws their initial values; ``reference_model`` is the
single-device oracle. ``swift.hub`` maps the parameters to the names used on the hub.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.models.attention_kernels import KERNELS, choose_kernel
    from swift.models.config import MODEL_SIZES, AttentionKernel, CustomBlock, ModelConfig, model_size
    from swift.models.cuts import BlockStacks, Chunks, Cut, make_cut
    from swift.models.gpt import GPT, MoeFunction, StackedWeights, Weights
    from swift.models.modules import linear, make_norm
    from swift.models.parameters import Group, root_key
    from swift.models.reference_model import plain_logits, plain_sums
    from swift.models.vocabulary.layouts import ColumnSharded, RowSharded

_MODULES = {
    "swift.models.attention_kernels": ["KERNELS", "choose_kernel"],
    "swift.models.config": ["MODEL_SIZES", "AttentionKernel", "ModelConfig", "CustomBlock", "model_size"],
    "swift.models.cuts": ["BlockStacks", "Chunks", "Cut", "make_cut"],
    "swift.models.gpt": ["GPT", "MoeFunction", "StackedWeights", "Weights"],
    "swift.models.modules": ["linear", "make_norm"],
    "swift.models.parameters": ["Group", "root_key"],
    "swift.models.reference_model": ["plain_logits", "plain_sums"],
    "swift.models.vocabulary.layouts": ["ColumnSharded", "RowSharded"],
}
__all__ = [
    "GPT",
    "KERNELS",
    "MODEL_SIZES",
    "AttentionKernel",
    "BlockStacks",
    "Chunks",
    "ColumnSharded",
    "CustomBlock",
    "Cut",
    "Group",
    "ModelConfig",
    "MoeFunction",
    "RowSharded",
    "StackedWeights",
    "Weights",
    "choose_kernel",
    "linear",
    "make_cut",
    "make_norm",
    "model_size",
    "plain_logits",
    "plain_sums",
    "root_key",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
