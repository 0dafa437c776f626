"""The tensors of a Hugging Face checkpoint, and the location of each of them in our parameters.

A matrix of theirs is ``[out, in]``, ours is ``[in, out]``; queries, keys and values are three of theirs and one of
ours. ``transformers`` 5 keeps the experts of a layer in two tensors, and stores them so on request; these are read,
too.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from swift.models.gpt import GPT
from swift.models.hugging_face.families import Family

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Index: TypeAlias = tuple[int | slice, ...]
_OF_MOE = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate\.|experts\.|shared_experts\.)(.*)")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of older checkpoints that follow from the configuration."""


class TensorLocation(NamedTuple):
    """A tensor, and the location of its values in our parameters."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Its shape."""
    group: str
    """Group of the parameter, such as ``attention``."""
    layer: int
    """Index of the parameter in the stack of its group."""
    leaf: str
    """The parameter, such as ``qkv.kernel``."""
    expert: int | None = None
    """Index of the expert, for parameters with a leading dim of experts."""
    first: int = 0
    """First column of a matrix of ours that the tensor fills."""

    @property
    def parameter(self) -> str:
        """Name of the parameter in a model directory, such as ``attention.0.qkv.kernel``."""
        return f"{self.group}.{self.layer}.{self.leaf}"

    @property
    def is_matrix(self) -> bool:
        """Whether it is transposed in ours."""
        return len(self.shape) == 2 and self.leaf != "token_VD"

    def part_of(self, parameter: np.ndarray) -> np.ndarray:
        """A view of the tensor's values in the parameter, in the tensor's shape."""
        own = parameter if self.expert is None else parameter[self.expert]
        if not self.is_matrix:
            return own
        return own[:, self.first : self.first + self.shape[0]].T


def tensor_locations(family: Family, gpt: GPT) -> Iterator[TensorLocation]:
    """Lists the tensors of a model, in the order of its layers."""
    config = gpt.config
    vocabulary = (gpt.vocab_size, config.model_dim)
    yield TensorLocation(EMBEDDING, vocabulary, "embedding", 0, "token_VD")
    counts = {True: 0, False: 0}
    for layer, is_moe in enumerate(config.moe_layers):
        yield from _attention(gpt, layer)
        index = counts[is_moe]
        yield from _moe(family, gpt, layer, index) if is_moe else _dense(gpt, layer, index)
        counts[is_moe] += 1
    yield TensorLocation("model.norm.weight", (config.model_dim,), "head", 0, "norm.scale")
    if not config.tied_embeddings:
        yield TensorLocation(HEAD, vocabulary, "head", 0, "out.kernel")


def parts_of_tensor(family: Family, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Index]]:
    """Lists the tensors that a stored one holds, by the names that ``tensor_locations`` has.

    Args:
        family: architecture.
        name: name in the file.
        shape: its shape.

    Yields:
        (name, index of the values): the tensor itself, or a matrix of each expert.
    """
    of_moe = _OF_MOE.fullmatch(name)
    if of_moe:  # as models in memory name it, whatever the family
        name = f"{of_moe[1]}.{family.moe}.{of_moe[2]}{of_moe[3]}"
    fused = _FUSED.fullmatch(name)
    if _COMPUTED.fullmatch(name):
        return
    if fused is None or len(shape) != 3:
        yield name, ()
        return
    gate, up, down = family.ffn
    for expert in range(shape[0]):
        if fused[2] == "down_proj":
            yield f"{fused[1]}.{expert}.{down}.weight", (expert,)
        else:
            half = shape[1] // 2
            yield f"{fused[1]}.{expert}.{gate}.weight", (expert, slice(half))
            yield f"{fused[1]}.{expert}.{up}.weight", (expert, slice(half, None))


def _attention(gpt: GPT, layer: int) -> Iterator[TensorLocation]:
    config, at = gpt.config, f"model.layers.{layer}"
    dim, width, kv_width = config.model_dim, config.num_heads * config.channels, config.kv_heads * config.channels
    yield TensorLocation(f"{at}.input_layernorm.weight", (dim,), "attention", layer, "norm.scale")
    first = 0
    for part, size in (("q", width), ("k", kv_width), ("v", kv_width)):
        name = f"{at}.self_attn.{part}_proj.weight"
        yield TensorLocation(name, (size, dim), "attention", layer, "qkv.kernel", first=first)
        first += size
    yield TensorLocation(f"{at}.self_attn.o_proj.weight", (dim, width), "attention", layer, "out.kernel")
    if config.qk_norm != "none":
        by_head = config.qk_norm == "head"
        for part, leaf, size in (("q", "query_norm", width), ("k", "key_norm", kv_width)):
            shape = (config.channels if by_head else size,)
            yield TensorLocation(f"{at}.self_attn.{part}_norm.weight", shape, "attention", layer, f"{leaf}.scale")


def _dense(gpt: GPT, layer: int, index: int) -> Iterator[TensorLocation]:
    at, dim = f"model.layers.{layer}", gpt.config.model_dim
    yield TensorLocation(f"{at}.post_attention_layernorm.weight", (dim,), "mlp", index, "norm.scale")
    yield from _ffn(f"{at}.mlp", ("gate_proj", "up_proj", "down_proj"), dim, gpt.config.ffn_dim, "mlp", index, "ffn.")


def _moe(family: Family, gpt: GPT, layer: int, index: int) -> Iterator[TensorLocation]:
    config, at = gpt.config, f"model.layers.{layer}"
    dim, width, moe = config.model_dim, config.expert_width, f"{at}.{family.moe}"
    yield TensorLocation(f"{at}.post_attention_layernorm.weight", (dim,), "router", index, "norm.scale")
    yield TensorLocation(f"{moe}.gate.weight", (gpt.num_classes, dim), "router", index, "score.kernel")
    if config.num_shared_experts:
        shared = config.num_shared_experts * width
        yield from _ffn(f"{moe}.shared_experts", family.ffn, dim, shared, "router", index, "shared.")
    for expert in range(gpt.num_classes):
        yield from _ffn(f"{moe}.experts.{expert}", family.ffn, dim, width, "expert", index, "", expert)


def _ffn(
    at: str,
    names: tuple[str, str, str],
    dim: int,
    width: int,
    group: str,
    index: int,
    prefix: str,
    expert: int | None = None,
) -> Iterator[TensorLocation]:
    shapes = {"gate": (width, dim), "up": (width, dim), "down": (dim, width)}
    for name, (ours, shape) in zip(names, shapes.items(), strict=True):
        yield TensorLocation(f"{at}.{name}.weight", shape, group, index, f"{prefix}{ours}.kernel", expert)
