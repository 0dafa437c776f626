"""Resharding a state to other ranks, slots or stages: every expert keeps its values, bit for bit.

Also to a sharded embedding from a replicated one, and back.

On the host, in the layout of a checkpoint: RANKED ``[P, layer, N, ...]`` and SHARED ``[P, ...]``, without slots.

Legend: P stages, L MoE layers of a stage, N ranks, S slots of a rank, E expert classes, W values of an expert,
w = W / N.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from swift.experts.state_layouts import Decoupled, Layout
from swift.mesh.live import storage_mesh
from swift.models.cuts import make_cut
from swift.models.gpt import GPT
from swift.models.vocabulary.layouts import RowSharded
from swift.pipeline.state import EMBEDDING_AND_HEAD, TrainState
from swift.pipeline.step.spec import StepSpec
from swift.topology import Topology


@dataclass(frozen=True)
class StateShape:
    """The numbers that, beside the model, determine the shapes of a state.

    Attributes:
        num_stages: P.
        num_ranks: N.
        slots_per_rank: S.
        cut: number of blocks of each stage; None: as many in all stages.
        embedding: whether each rank has rows of the embedding, ``sharded``; None: slices of the whole.
    """

    num_stages: int
    num_ranks: int
    slots_per_rank: int
    cut: tuple[int, ...] | None = None
    embedding: Literal["sharded"] | None = None

    def __post_init__(self) -> None:
        if self.cut is not None:
            object.__setattr__(self, "cut", tuple(self.cut))  # JSON has lists

    @classmethod
    def of(cls, spec: StepSpec) -> "StateShape":
        """The shape of the state of a step spec."""
        sizes = spec.cut.sizes
        cut = None if len(set(sizes)) == 1 else sizes
        embedding: Literal["sharded"] | None = "sharded" if spec.gpt.embedding_ranks > 1 else None
        return cls(spec.num_stages, spec.live.num_ranks, spec.experts.slots_per_rank, cut, embedding)

    def equals_beside_embedding(self, other: "StateShape") -> bool:
        """Whether two shapes are equal but for the layout of the embedding, or altogether."""
        return replace(self, embedding=None) == replace(other, embedding=None)

    def to_json(self) -> dict[str, Any]:
        """The numbers by name; ``StateShape(**numbers)`` is the inverse."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def reshaped(spec: StepSpec, shape: StateShape) -> StepSpec:
    """The spec of the same model for a state of another shape, on one device: it describes the state, and cannot run.

    Optimizer state that is tied to slots (the layout ``coupled``) has one shape only, but for the embedding.
    """
    current_shape = StateShape.of(spec)
    if shape == current_shape:
        return spec
    head_ranks = shape.num_ranks if spec.gpt.head_ranks > 1 else 1
    gpt = replace(spec.gpt, head_ranks=head_ranks, embedding_ranks=1 if shape.embedding is None else shape.num_ranks)
    if shape.equals_beside_embedding(current_shape):
        layouts = {**spec.layouts, "embedding": _of_embedding(spec.layouts["embedding"], gpt)}
        return replace(spec, gpt=gpt, layouts=layouts, worker_shapes=None)  # type: ignore[arg-type]
    layouts = {}
    for name, layout in spec.layouts.items():
        assert isinstance(layout, Decoupled), "only state of which every rank has a slice can be resharded"
        layouts[name] = replace(layout, num_ranks=shape.num_ranks)
    return replace(
        spec,
        gpt=gpt,
        live=storage_mesh(Topology(1, shape.num_stages, shape.num_ranks)),
        experts=replace(spec.experts, slots_per_rank=shape.slots_per_rank),
        layouts=layouts | {"embedding": _of_embedding(layouts["embedding"], gpt)},
        cut=make_cut(spec.cut.moe_layers, shape.num_stages, shape.cut, "Experiment.cut"),
        chunks=None,  # type: ignore[arg-type]
        worker_shapes=None,  # type: ignore[arg-type]
    )


def _of_embedding(layout: Layout, gpt: GPT) -> Layout:
    """The layout of an embedding on as many ranks, sharded if the model says so."""
    assert isinstance(layout, Decoupled)
    common = {field.name: getattr(layout, field.name) for field in fields(Decoupled)}
    if gpt.embedding_ranks == 1:
        return Decoupled(**common)
    return RowSharded(**common, num_rows=gpt.vocab_size, row_size=gpt.config.model_dim)


def reshape_state(state: TrainState, old: StepSpec, new: StepSpec) -> TrainState:
    """Reshards a state on the host from the shape of one spec to that of another.

    Master weights and moments keep their values. Every expert gets replicas in proportion to those that it had, and the
    policy's own state starts afresh, unless the embedding alone is laid out otherwise.

    Args:
        state: state of ``old``, without slots.
        old: spec of the state.
        new: spec of the same model, see ``reshaped``.
    """
    before, after = StateShape.of(old), StateShape.of(new)
    if before == after:
        return state
    stays = after.equals_beside_embedding(before)

    def reshard(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        if stays and names[-1:] != ["embedding"]:
            return leaf
        return _reshard_group(names[-1], leaf, old, new) if names else _in_all_stages(leaf, new)

    master, moments = jax.tree_util.tree_map_with_path(reshard, (state.master, state.moments))
    if stays:
        return replace(state, master=master, moments=moments)
    placement, policy = _place(state.placement, old, new)
    return TrainState(_in_all_stages(state.step, new), master, moments, {}, placement, policy)


def _reshard_group(name: str, slices: np.ndarray, old: StepSpec, new: StepSpec) -> np.ndarray:
    """The slices ``[P, layer, N, E, w]`` of a group on other ranks and stages."""
    before, after = old.layouts[name], new.layouts[name]
    assert isinstance(before, Decoupled)
    assert isinstance(after, Decoupled)
    if name in EMBEDDING_AND_HEAD:  # all stages have a copy, and one stage's is in use
        end = before.classes(slices[{"embedding": 0, "head": -1}[name]], None)
        return _in_all_stages(np.asarray(after.init(end, None))[None], new)
    class_weights = _by_stage(lambda stage_slices: before.classes(stage_slices, None), slices)
    class_weights = _cut_anew(class_weights, old.model_index[name], new.model_index[name])
    return _by_stage(lambda stage_weights: np.asarray(after.init(stage_weights, None)), class_weights)


def _by_stage(function: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray:
    """Applies a function to each stage's part; besides the result, that of one stage is in memory."""
    first = function(array[0])
    result = np.empty((len(array), *first.shape), first.dtype)
    result[0] = first
    del first
    for stage in range(1, len(array)):
        result[stage] = function(array[stage])
    return result


def _cut_anew(array: np.ndarray, old_index: np.ndarray, new_index: np.ndarray) -> np.ndarray:
    """An array ``[P, layer, ...]`` in the stacks of another cut; zeros in layers that are padding.

    Args:
        array: array of the old cut.
        old_index, new_index: see ``StepSpec.model_index``.
    """
    block_at = np.argwhere(old_index >= 0)  # in the order of the model
    result = np.zeros((*new_index.shape, *array.shape[2:]), array.dtype)
    for stage, layer in np.argwhere(new_index >= 0):
        result[stage, layer] = array[tuple(block_at[new_index[stage, layer]])]
    return result


def _in_all_stages(array: np.ndarray, new: StepSpec) -> np.ndarray:
    """An array ``[P, ...]`` for other stages, such as a counter; all stages have the same."""
    return np.broadcast_to(array[:1], (new.num_stages, *array.shape[1:])).copy()


def _place(placement_PLNS: np.ndarray, old: StepSpec, new: StepSpec) -> tuple[np.ndarray, Any]:
    """The placement ``[P, L, N, S]`` and the policy's state ``[P, ...]`` in the new shape, on the host."""
    num_classes, config = new.experts.num_classes, new.experts
    is_class = placement_PLNS.reshape(*placement_PLNS.shape[:2], -1, 1) == np.arange(num_classes)
    replicas_PLE = is_class.sum(axis=2, dtype=np.int32)
    num_layers = new.num_moe_layers
    init, remembered = new.policy.init(num_layers, num_classes, new.live.num_ranks, config.slots_per_rank)
    stages = _cut_anew(replicas_PLE, old.cut.model_index(True), new.cut.model_index(True))
    placements = [new.policy(jnp.asarray(replicas), init, remembered)[0] for replicas in stages]
    policy = jax.tree.map(lambda leaf: _in_all_stages(np.asarray(leaf)[None], new), remembered)
    return np.stack([np.asarray(placement) for placement in placements]), policy
