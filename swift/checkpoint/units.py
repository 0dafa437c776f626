"""Division of a training state into a dense part and experts, which are saved and restored one by one.

An expert's state is its master weights and moments: its entry in every array of the group ``expert``. In the layout
``coupled``, the optimizer's state belongs to slots rather than experts, so everything is in the dense part.

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
    """Returns the leaves of a tree by path, such as ``master.expert``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def shape_text(leaf: Any) -> str:
    """Formats an array's dtype and shape, such as ``float32[4, 8]``; manifests store shapes in this format."""
    return f"{leaf.dtype}{list(leaf.shape)}"


@dataclass(frozen=True)
class Snapshot:
    """The values of one checkpoint, on the host.

    Attributes:
        dense: arrays of the dense part by name, ``[P, ...]``.
        blocks: state of the chosen experts by dtype, ``[layers, K, V, N, w]``, in the order of the model's MoE layers.
        chosen_LK: expert classes chosen in every MoE layer, ``[layers, K]``.
    """

    dense: dict[str, np.ndarray]
    blocks: dict[str, np.ndarray]
    chosen_LK: np.ndarray

    def experts(self) -> Iterator[tuple[Unit, dict[str, np.ndarray]]]:
        """Yields every chosen expert with views of its state by dtype, ``[V, N, w]`` each."""
        for layer, classes in enumerate(self.chosen_LK.tolist()):
            for index, class_ in enumerate(classes):
                yield (layer, class_), {dtype: block[layer, index] for dtype, block in self.blocks.items()}


@dataclass(frozen=True)
class StateSplit:
    """The division of a state's arrays into dense arrays and arrays that are split by expert, and their layout.

    Attributes:
        abstract: the state as a tree of shapes and dtypes: RANKED ``[P, layer, N, ...]`` and SHARED ``[P, ...]``.
        specs: RANKED or SHARED for each array, or a prefix tree of these.
        has_classes: whether expert arrays have a class dimension: ``[P, L, N, E, w]``. Without it, nothing is saved by
            expert.
        layers_P: number of MoE layers in each stage, at most L. They come first in the stage's stacks; the rest is zero
            padding. None if every stage has L layers.
    """

    abstract: Any
    specs: Any
    has_classes: bool
    layers_P: tuple[int, ...] | None = None

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shape and dtype of every array, by name."""
        return by_name(self.abstract)

    @cached_property
    def expert_names(self) -> tuple[str, ...]:
        """Names of the arrays that are split by expert."""
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(self.abstract)[0]]
        return tuple(name for name, path in zip(self.shapes, paths, strict=True) if self.has_classes and _GROUP in path)

    @cached_property
    def dense_shapes(self) -> dict[str, Any]:
        """Shape and dtype of every dense array, by name."""
        return {name: leaf for name, leaf in self.shapes.items() if name not in self.expert_names}

    @cached_property
    def ranked_names(self) -> frozenset[str]:
        """Names of the arrays that are sharded over the expert ranks."""
        is_ranked = by_name(map_specs(lambda spec, _: spec == RANKED, self.specs, self.abstract))
        return frozenset(name for name, ranked in is_ranked.items() if ranked)

    @cached_property
    def names_of_type(self) -> dict[str, list[str]]:
        """Names of the expert arrays by dtype, with V names for each."""
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
        """MoE layers that each stage holds, numbered through the model."""
        num_stages, num_layers = self._expert_shape[:2]
        counts = (num_layers,) * num_stages if self.layers_P is None or not self.expert_names else self.layers_P
        ends = list(accumulate(counts, initial=0))
        return tuple(range(first, end) for first, end in pairwise(ends))

    @property
    def num_layers(self) -> int:
        """Number of MoE layers in the model; 0 if nothing is saved by expert."""
        return sum(map(len, self.layers_of_stages))

    def location(self, layer: int) -> tuple[int, int]:
        """Returns (stage, index in the stage's stack) for a MoE layer of the model."""
        return next((p, layer - layers[0]) for p, layers in enumerate(self.layers_of_stages) if layer in layers)

    @property
    def num_classes(self) -> int:
        """Number of expert classes, E."""
        return self._expert_shape[3]

    @property
    def unit_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one expert's state by dtype, ``[V, N, w]`` each."""
        _, _, num_ranks, _, size = self._expert_shape
        return {
            dtype: jax.ShapeDtypeStruct((len(names), num_ranks, size), dtype)
            for dtype, names in self.names_of_type.items()
        }

    @property
    def unit_bytes(self) -> int:
        """Bytes of one expert's state, over all ranks."""
        return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in self.unit_shapes.values())

    def by_stage(self, chosen_LK: Int[np.ndarray, "layers K"]) -> Int[np.ndarray, "P L K"]:
        """Arranges chosen classes by stage, ``[P, L, K]``; padding layers get zeros."""
        num_stages, num_layers = self._expert_shape[:2]
        chosen_PLK = np.zeros((num_stages, num_layers, chosen_LK.shape[-1]), chosen_LK.dtype)
        for stage, layers in enumerate(self.layers_of_stages):
            chosen_PLK[stage, : len(layers)] = chosen_LK[layers.start : layers.stop]
        return chosen_PLK

    def new_blocks(self, k: int) -> dict[str, np.ndarray]:
        """Allocates uninitialized blocks for K experts of every layer, see ``Snapshot``."""
        return {
            dtype: np.empty((self.num_layers, k, *shape.shape), shape.dtype)
            for dtype, shape in self.unit_shapes.items()
        }

    def view(self, blocks: Mapping[str, np.ndarray], name: str) -> Shaped[np.ndarray, "layers N K w"]:
        """Returns one array's values as a view into the blocks, ``[layers, N, K, w]``."""
        dtype = str(self.shapes[name].dtype)
        block, index = blocks[dtype], self.names_of_type[dtype].index(name)
        view = block[:, :, index].transpose(0, 2, 1, 3)
        assert np.shares_memory(view, block) or not block.size
        return view

    def put(
        self, blocks: Mapping[str, np.ndarray], name: str, array_PLNKw: np.ndarray, index: tuple[slice, ...] = ()
    ) -> None:
        """Writes one array of the chosen experts, ``[P, L, N, K, w]`` or its slice at ``index``, into the blocks."""
        stages, _, *rest = index or (slice(None),) * 5
        view = self.view(blocks, name)
        for layers, array in zip(self.layers_of_stages[stages], array_PLNKw, strict=True):
            view[layers.start : layers.stop][(slice(None), *rest)] = array[: len(layers)]

    def host_snapshot(self, state: Any, chosen_LK: Int[np.ndarray, "layers K"]) -> Snapshot:
        """Creates a snapshot of a state that is on the host; the dense part is shared, not copied."""
        arrays, blocks = by_name(state), self.new_blocks(chosen_LK.shape[-1])
        index = self.by_stage(chosen_LK)[:, :, None, :, None]
        for name in self.expert_names:
            self.put(blocks, name, np.take_along_axis(arrays[name], index, axis=3))
        return Snapshot({name: arrays[name] for name in self.dense_shapes}, blocks, chosen_LK)

    def join(self, dense: Mapping[str, np.ndarray], blocks: Mapping[str, np.ndarray]) -> Any:
        """Reassembles the state from its dense part and all experts' blocks, which are in order of class."""
        experts = {name: self._expert_array(blocks, name) for name in self.expert_names}
        arrays = [experts[name] if name in experts else dense[name] for name in self.shapes]
        return jax.tree.unflatten(jax.tree.structure(self.abstract), arrays)

    def _expert_array(self, blocks: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        """Reassembles one expert array, ``[P, L, N, E, w]``; padding layers are zeros."""
        view, shape = self.view(blocks, name), self.shapes[name]
        array = np.zeros(shape.shape, shape.dtype)
        for stage, layers in enumerate(self.layers_of_stages):
            array[stage, : len(layers)] = view[layers.start : layers.stop]
        return array

    def bytes_per_rank(self, k: int) -> list[list[int]]:
        """Computes the bytes of a checkpoint with K experts in each layer, by stage and rank, ``[P][N]``.

        Arrays that all ranks share are attributed to rank 0.
        """
        num_bytes = {name: math.prod(leaf.shape) * leaf.dtype.itemsize for name, leaf in self.dense_shapes.items()}
        total = sum(size for name, size in num_bytes.items() if name in self.ranked_names)
        total += self.num_layers * k * self.unit_bytes
        shared_bytes = sum(size for name, size in num_bytes.items() if name not in self.ranked_names) // self.num_stages
        each = total // (self.num_stages * self.num_ranks)
        return [[each + shared_bytes, *[each] * (self.num_ranks - 1)] for _ in range(self.num_stages)]
