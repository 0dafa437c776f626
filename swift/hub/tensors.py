"""The tensors of a Hugging Face checkpoint: their locations in Swift's parameters, and the safetensors files.

Hugging Face stores a matrix as ``[out, in]``, and Swift as ``[in, out]``. Swift concatenates the matrices of queries,
keys and values. ``transformers`` 5 holds the experts of a layer in two fused tensors and can also store them in this
format, which is supported when reading.

A directory contains one safetensors file, or several with an index. If there are both a single file and an index, the
single file is read, as in ``transformers``.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from swift.errors import RunError, SettingError
from swift.files import read_regular, sync_file
from swift.hub.architectures import Family
from swift.models.gpt import GPT

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Index: TypeAlias = tuple[int | slice, ...]
_OF_MOE = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate\.|experts\.|shared_experts\.)(.*)")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors in older checkpoints that can be computed from the configuration, and are ignored."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_METADATA = {"format": "pt"}
"""Metadata that ``transformers`` requires in a file, which declares the conventions of PyTorch."""


class TensorLocation(NamedTuple):
    """A Hugging Face tensor, and the location of its values in Swift's parameters."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    group: str
    """Group of the parameter, such as ``attention``."""
    layer: int
    """Index of the parameter in its group's stack."""
    leaf: str
    """Name of the parameter within the layer, such as ``qkv.kernel``."""
    expert: int | None = None
    """Index of the expert, for parameters with a leading expert dimension."""
    first: int = 0
    """First of the parameter's columns that the tensor fills, for a matrix."""

    @property
    def parameter(self) -> str:
        """Name of the parameter in a model directory, such as ``attention.0.qkv.kernel``."""
        return f"{self.group}.{self.layer}.{self.leaf}"

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor is a matrix that Swift stores transposed; the embedding is not."""
        return len(self.shape) == 2 and self.leaf != "token_VD"

    def part_of(self, parameter: np.ndarray) -> np.ndarray:
        """Returns a view of the tensor's values in the parameter, in the tensor's shape."""
        values = parameter if self.expert is None else parameter[self.expert]
        if not self.is_matrix:
            return values
        return values[:, self.first : self.first + self.shape[0]].T


def tensor_locations(family: Family, gpt: GPT) -> Iterator[TensorLocation]:
    """Lists a model's tensors in the order of its layers."""
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
    """Splits a stored tensor into the tensors that ``tensor_locations`` names.

    Args:
        family: architecture.
        name: name of the stored tensor.
        shape: shape of the stored tensor.

    Yields:
        (name, index of the values in the stored tensor), for the tensor itself or, if it is fused, for the matrices of
        each expert.
    """
    moe_match = _OF_MOE.fullmatch(name)
    if moe_match:  # transformers 5 names the module ``mlp`` in memory, for every family
        name = f"{moe_match[1]}.{family.moe}.{moe_match[2]}{moe_match[3]}"
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
    for name, (parameter, shape) in zip(names, shapes.items(), strict=True):
        yield TensorLocation(f"{at}.{name}.weight", shape, group, index, f"{prefix}{parameter}.kernel", expert)


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a directory, whose values are read one by one on demand.

    Attributes:
        directory: directory of the files.
        file_of: name of the file that contains each tensor.
        shapes: shape of each tensor.
    """

    directory: Path
    file_of: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, directory: Path) -> "TensorFiles":
        """Reads the index and the headers of the files.

        Raises:
            SettingError: a file is missing, truncated or not a safetensors file, or lacks a tensor of the index.
        """
        index = directory / INDEX
        file_of = _read_index(index) if index.exists() and not (directory / SINGLE).exists() else None
        shapes: dict[str, tuple[int, ...]] = {}
        file_by_tensor: dict[str, str] = {}
        for name in sorted(set(file_of.values())) if file_of is not None else [SINGLE]:
            with _opened(directory / name) as file:
                for tensor in file.keys():  # noqa: SIM118 (not a mapping)
                    shapes[tensor], file_by_tensor[tensor] = tuple(file.get_slice(tensor).get_shape()), name
        for tensor, name in (file_of or {}).items():
            if file_by_tensor.get(tensor) != name:
                raise SettingError("DIR", str(directory), f"lacks {tensor}, which its index finds in {name}")
        return cls(directory, file_by_tensor, shapes)

    def read(self, *names: str) -> Iterator[tuple[str, np.ndarray]]:
        """Reads the named tensors, or all if no names are given, file by file, in their stored dtypes."""
        selected = set(names or self.file_of)
        for name in sorted({self.file_of[tensor] for tensor in selected}):
            with _opened(self.directory / name) as file:
                for tensor in file.keys():  # noqa: SIM118 (not a mapping)
                    if tensor in selected:
                        yield tensor, file.get_tensor(tensor)


def write_tensors(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], sizes: Sequence[int], most: int) -> None:
    """Writes tensors to files of limited size, with an index if there are several; reads each file back to verify it.

    Args:
        directory: existing directory.
        tensors: name and value of each tensor; consumed lazily, so that only one file's tensors are in memory.
        sizes: size of each tensor in bytes.
        most: maximum size of a file in bytes, unless a single tensor is larger.

    Raises:
        OSError: a file cannot be written.
        RunError: a file cannot be written, or its values differ from those in memory.
    """
    counts = _counts(sizes, most)
    names = [SINGLE]
    if len(counts) > 1:
        names = [f"model-{number:05}-of-{len(counts):05}.safetensors" for number in range(1, len(counts) + 1)]
    weight_map: dict[str, str] = {}
    ordered = iter(tensors)
    for name, count in zip(names, counts, strict=True):
        file_tensors = dict(next(ordered) for _ in range(count))
        _write(directory / name, file_tensors)
        weight_map |= dict.fromkeys(file_tensors, name)
    if len(counts) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _counts(sizes: Sequence[int], most: int) -> list[int]:
    """Returns the number of tensors in each file, when files are filled in order."""
    counts, used = [0], 0
    for size in sizes:
        if counts[-1] and used + size > most:
            counts.append(0)
            used = 0
        counts[-1] += 1
        used += size
    return counts


def _write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(tensors, path, metadata=_METADATA)
    except SafetensorError as error:
        raise RunError(f"{path}: cannot be written: {error}") from error
    sync_file(path)
    with _opened(path) as file:
        for name, value in tensors.items():
            if not np.array_equal(file.get_tensor(name).view(np.uint8), value.view(np.uint8)):
                raise RunError(f"{path}: {name} was not written as it is in memory: try again")


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises SettingError if the file is unreadable or is not a JSON object."""
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise SettingError("DIR", str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SettingError("DIR", str(path), f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingError("DIR", str(path), "is not a JSON object")
    return content


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SettingError("DIR", str(path), "has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise SettingError(
                "DIR", str(path), f"finds {tensor} in {name!r}, which is not the name of a file beside it"
            )
    return weight_map


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        allowed = "needs the extra 'hf': pip install 'swift-moe[hf]'"
        raise SettingError("DIR", str(path.parent), allowed) from None
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise SettingError("DIR", str(path), "is missing") from error
    except OSError as error:
        raise SettingError("DIR", str(path), f"cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise SettingError("DIR", str(path), f"is not a whole safetensors file: {error}") from error
