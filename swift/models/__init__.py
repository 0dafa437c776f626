"""Decoders with dense layers and mixtures of experts: GPT-2's and those of today's open models.

``config`` is a model's shape and ``sizes`` those with a name; ``gpt`` is the forward pass, cut where pipelines cut, and
``cuts`` says where; ``attention`` (with ``rope``) and ``modules`` are its parts, ``row_sums`` the gradient of a large
embedding; ``token_losses`` is the loss without all logits at once, ``vocabulary`` has embedding and head in shares;
``parameter_groups`` packs parameters into the flat vectors that the optimizer shares; ``reference_model`` is the
single-device oracle; ``hugging_face`` has the hub's names for the same.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.models.attention.kernels import KERNELS, AttentionKernel, choose_kernel
    from swift.models.config import ModelConfig, OwnBlock
    from swift.models.cuts.chunks import Chunks
    from swift.models.cuts.cut import Cut, make_cut
    from swift.models.cuts.stacks import BlockStacks
    from swift.models.gpt import BLOCK_GROUPS, GPT, MoeFunction, StackedWeights, Weights
    from swift.models.modules import linear, make_norm
    from swift.models.parameter_groups import Group, root_key
    from swift.models.reference_model import plain_logits, plain_sums
    from swift.models.sizes import MODEL_SIZES, model_size
    from swift.models.token_losses import tokens_at_once
    from swift.models.vocabulary.column_shares import ColumnShares
    from swift.models.vocabulary.embedding import Copies
    from swift.models.vocabulary.hot_rows import add_gradients_of_copies, choose_hot_rows, fetch_copies, num_hot_rows
    from swift.models.vocabulary.row_look_up import requests_at_once, rounds_if_different
    from swift.models.vocabulary.row_shares import RowShares

_MODULES = {
    "swift.models.attention.kernels": ["AttentionKernel", "KERNELS", "choose_kernel"],
    "swift.models.config": ["ModelConfig", "OwnBlock"],
    "swift.models.cuts.chunks": ["Chunks"],
    "swift.models.cuts.cut": ["Cut", "make_cut"],
    "swift.models.cuts.stacks": ["BlockStacks"],
    "swift.models.gpt": ["BLOCK_GROUPS", "GPT", "MoeFunction", "StackedWeights", "Weights"],
    "swift.models.modules": ["linear", "make_norm"],
    "swift.models.parameter_groups": ["Group", "root_key"],
    "swift.models.reference_model": ["plain_logits", "plain_sums"],
    "swift.models.sizes": ["MODEL_SIZES", "model_size"],
    "swift.models.token_losses": ["tokens_at_once"],
    "swift.models.vocabulary.column_shares": ["ColumnShares"],
    "swift.models.vocabulary.embedding": ["Copies"],
    "swift.models.vocabulary.hot_rows": ["add_gradients_of_copies", "choose_hot_rows", "fetch_copies", "num_hot_rows"],
    "swift.models.vocabulary.row_look_up": ["requests_at_once", "rounds_if_different"],
    "swift.models.vocabulary.row_shares": ["RowShares"],
}
__all__ = [
    "BLOCK_GROUPS",
    "GPT",
    "KERNELS",
    "MODEL_SIZES",
    "AttentionKernel",
    "BlockStacks",
    "Chunks",
    "ColumnShares",
    "Copies",
    "Cut",
    "Group",
    "ModelConfig",
    "MoeFunction",
    "OwnBlock",
    "RowShares",
    "StackedWeights",
    "Weights",
    "add_gradients_of_copies",
    "choose_hot_rows",
    "choose_kernel",
    "fetch_copies",
    "linear",
    "make_cut",
    "make_norm",
    "model_size",
    "num_hot_rows",
    "plain_logits",
    "plain_sums",
    "requests_at_once",
    "root_key",
    "rounds_if_different",
    "tokens_at_once",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
