"""Division of a training state into a dense part and experts, each of which is saved and restored on its own.

An expert's state is its master weights and moments: its entry in every array of the group ``expert``. Where the
optimizer's state is tied to slots instead of experts (the layout ``coupled``), everything is in the dense part.

Legend: P stages, L MoE layers of a stage, N ranks, E expert classes, K chosen classes of a layer, w values of a rank's
slice, V arrays of an expert's state that have the same dtype.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from swift.mesh.per_rank import RANKED, map_specs

_GROUP = jax.tree_util.DictKey("expert")

Unit = tuple[int, int]
"""An expert: (MoE layer of the model, expert class)."""


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as ``master.expert``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def shape_text(leaf: Any) -> str:
    """Dtype and shape, such as ``float32[4, 8]``."""
    return f"{leaf.dtype}{list(leaf.shape)}"


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint, on the host.

    Attributes:
        dense: arrays of the dense part by name, ``[P, ...]``.
        blocks: state of the experts by dtype, ``[layers, K, V, N, w]``, in the order of the model's MoE layers.
        chosen_LK: the chosen classes of every MoE layer of the model, ``[layers, K]``.
    """

    dense: dict[str, np.ndarray]
    blocks: dict[str, np.ndarray]
    chosen_LK: np.ndarray

    def experts(self) -> Iterator[tuple[Unit, dict[str, np.ndarray]]]:
        """Every chosen expert with views of its state by dtype, ``[V, N, w]`` each."""
        for layer, classes in enumerate(self.chosen_LK.tolist()):
            for index, class_ in enumerate(classes):
                yield (layer, class_), {dtype: block[layer, index] for dtype, block in self.blocks.items()}


@dataclass(frozen=True)
class StateSplit:
    """Division of a state's arrays into dense ones and those of experts.

    Attributes:
        abstract: the state as a tree of shapes and dtypes: RANKED ``[P, layer, N, ...]`` and SHARED ``[P, ...]``.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        has_classes: whether the arrays of the experts have a dim of classes: ``[P, L, N, E, w]``.
        layers_P: MoE layers of each stage, at most L, first in its stacks; the others are padding, which is zeros.
            None: L layers.
    """

    abstract: Any
    specs: Any
    has_classes: bool
    layers_P: tuple[int, ...] | None = None

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Every array by name."""
        return by_name(self.abstract)

    @cached_property
    def expert_names(self) -> tuple[str, ...]:
        """Names of the arrays that are divided by expert."""
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(self.abstract)[0]]
        return tuple(name for name, path in zip(self.shapes, paths, strict=True) if self.has_classes and _GROUP in path)

    @cached_property
    def dense_shapes(self) -> dict[str, Any]:
        """The arrays of the dense part, by name."""
        return {name: leaf for name, leaf in self.shapes.items() if name not in self.expert_names}

    @cached_property
    def ranked_names(self) -> frozenset[str]:
        """Names of the arrays of which every rank has a slice."""
        is_ranked = by_name(map_specs(lambda spec, _: spec == RANKED, self.specs, self.abstract))
        return frozenset(name for name, ranked in is_ranked.items() if ranked)

    @cached_property
    def names_of_type(self) -> dict[str, list[str]]:
        """Names of the experts' arrays by dtype, V each."""
        types = {str(self.shapes[name].dtype) for name in self.expert_names}
        return {
            dtype: [name for name in self.expert_names if self.shapes[name].dtype == dtype] for dtype in sorted(types)
        }

    @property
    def _expert_shape(self) -> tuple[int, ...]:
        return self.shapes[self.expert_names[0]].shape if self.expert_names else (0, 0, 0, 0, 0)

    @property
    def num_stages(self) -> int:
        """Number of stages, P."""
        return next(iter(self.shapes.values())).shape[0]

    @property
    def num_ranks(self) -> int:
        """Number of expert ranks, N."""
        return next((self.shapes[name].shape[2] for name in self.ranked_names), 1)

    @cached_property
    def layers_of_stages(self) -> tuple[range, ...]:
        """MoE layers of the model that each stage has first in its stacks, whose experts are saved one by one."""
        num_stages, num_layers = self._expert_shape[:2]
        counts = (num_layers,) * num_stages if self.layers_P is None or not self.expert_names else self.layers_P
        ends = list(accumulate(counts, initial=0))
        return tuple(range(first, end) for first, end in pairwise(ends))

    @property
    def num_layers(self) -> int:
        """MoE layers of the model whose experts are saved one by one."""
        return sum(map(len, self.layers_of_stages))

    def location(self, layer: int) -> tuple[int, int]:
        """(stage, index in its stack) of a MoE layer of the model."""
        return next((p, layer - layers[0]) for p, layers in enumerate(self.layers_of_stages) if layer in layers)

    @property
    def num_classes(self) -> int:
        """Number of expert classes, E."""
        return self._expert_shape[3]

    @property
    def unit_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of an expert's state by dtype, ``[V, N, w]`` each."""
        _, _, num_ranks, _, size = self._expert_shape
        return {
            dtype: jax.ShapeDtypeStruct((len(names), num_ranks, size), dtype)
            for dtype, names in self.names_of_type.items()
        }

    @property
    def unit_bytes(self) -> int:
        """Bytes of an expert's state."""
        return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in self.unit_shapes.values())

    def by_stage(self, chosen_LK: Int[np.ndarray, "layers K"]) -> Int[np.ndarray, "P L K"]:
        """Chosen classes ``[P, L, K]``; zeros in layers that are padding."""
        num_stages, num_layers = self._expert_shape[:2]
        chosen_PLK = np.zeros((num_stages, num_layers, chosen_LK.shape[-1]), chosen_LK.dtype)
        for stage, layers in enumerate(self.layers_of_stages):
            chosen_PLK[stage, : len(layers)] = chosen_LK[layers.start : layers.stop]
        return chosen_PLK

    def new_blocks(self, k: int) -> dict[str, np.ndarray]:
        """Uninitialized blocks for K experts of every layer, see ``Snapshot``."""
        return {
            dtype: np.empty((self.num_layers, k, *shape.shape), shape.dtype)
            for dtype, shape in self.unit_shapes.items()
        }

    def view(self, blocks: Mapping[str, np.ndarray], name: str) -> Shaped[np.ndarray, "layers N K w"]:
        """A view of the blocks of an array, ``[layers, N, K, w]``."""
        dtype = str(self.shapes[name].dtype)
        block, index = blocks[dtype], self.names_of_type[dtype].index(name)
        view = block[:, :, index].transpose(0, 2, 1, 3)
        assert np.shares_memory(view, block) or not block.size
        return view

    def put(
        self, blocks: Mapping[str, np.ndarray], name: str, array_PLNKw: np.ndarray, index: tuple[slice, ...] = ()
    ) -> None:
        """Writes an array of chosen experts ``[P, L, N, K, w]``, or its slice at ``index``, into blocks."""
        stages, _, *rest = index or (slice(None),) * 5
        view = self.view(blocks, name)
        for layers, array in zip(self.layers_of_stages[stages], array_PLNKw, strict=True):
            view[layers.start : layers.stop][(slice(None), *rest)] = array[: len(layers)]

    def host_snapshot(self, state: Any, chosen_LK: Int[np.ndarray, "layers K"]) -> Snapshot:
        """The snapshot of a state on the host; its dense part is not copied."""
        arrays, blocks = by_name(state), self.new_blocks(chosen_LK.shape[-1])
        index = self.by_stage(chosen_LK)[:, :, None, :, None]
        for name in self.expert_names:
            self.put(blocks, name, np.take_along_axis(arrays[name], index, axis=3))
        return Snapshot({name: arrays[name] for name in self.dense_shapes}, blocks, chosen_LK)

    def join(self, dense: Mapping[str, np.ndarray], blocks: Mapping[str, np.ndarray]) -> Any:
        """The state, from a dense part and from blocks of all experts in order of class."""
        experts = {name: self._expert_array(blocks, name) for name in self.expert_names}
        arrays = [experts[name] if name in experts else dense[name] for name in self.shapes]
        return jax.tree.unflatten(jax.tree.structure(self.abstract), arrays)

    def _expert_array(self, blocks: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        """An array ``[P, L, N, E, w]``, from blocks of all experts."""
        view, shape = self.view(blocks, name), self.shapes[name]
        array = np.zeros(shape.shape, shape.dtype)
        for stage, layers in enumerate(self.layers_of_stages):
            array[stage, : len(layers)] = view[layers.start : layers.stop]
        return array

    def bytes_per_rank(self, k: int) -> list[list[int]]:
        """Bytes of the dense part and K experts of every layer by stage and rank, ``[P][N]``.

        What all ranks share counts for rank 0.
        """
        num_bytes = {name: math.prod(leaf.shape) * leaf.dtype.itemsize for name, leaf in self.dense_shapes.items()}
        total = sum(size for name, size in num_bytes.items() if name in self.ranked_names)
        total += self.num_layers * k * self.unit_bytes
        shared_bytes = sum(size for name, size in num_bytes.items() if name not in self.ranked_names) // self.num_stages
        each = total // (self.num_stages * self.num_ranks)
        return [[each + shared_bytes, *[each] * (self.num_ranks - 1)] for _ in range(self.num_stages)]
