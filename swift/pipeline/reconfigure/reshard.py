"""Resharding of a state to other ranks, slots or stages: every expert keeps its values, bit for bit.

A state can also be converted between a sharded and a replicated embedding. Resharding works on the host, in the layout
of a checkpoint: RANKED ``[P, layer, N, ...]`` and SHARED ``[P, ...]``, without slots.

Legend: P stages, L MoE layers of a stage, N ranks, S slots of a rank, E expert classes, W values of an expert, w = W /
N.
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
    """Numbers that, together with the model, determine the shapes of a state.

    Attributes:
        num_stages: number of stages, P.
        num_ranks: number of expert ranks per worker, N.
        slots_per_rank: number of expert slots per rank, S.
        cut: number of blocks of each stage, or None if all stages have equally many.
        embedding: ``sharded`` if each rank has rows of the embedding; None if each has a slice of the whole.
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
        """Returns the shape of a step spec's state."""
        sizes = spec.cut.sizes
        cut = None if len(set(sizes)) == 1 else sizes
        embedding: Literal["sharded"] | None = "sharded" if spec.gpt.embedding_ranks > 1 else None
        return cls(spec.num_stages, spec.live.num_ranks, spec.experts.slots_per_rank, cut, embedding)

    def equals_beside_embedding(self, other: "StateShape") -> bool:
        """Whether two shapes are equal apart from the layout of the embedding."""
        return replace(self, embedding=None) == replace(other, embedding=None)

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes by name, without those that are None; ``StateShape(**attributes)`` is the inverse."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def reshaped(spec: StepSpec, shape: StateShape) -> StepSpec:
    """Returns a spec for the same model with another shape of state; it only describes the state and cannot run.

    Optimizer state that is tied to slots (the layout ``coupled``) cannot be resharded, except for the embedding.
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
    """Returns the layout of an embedding on the same ranks, sharded if the model says so."""
    assert isinstance(layout, Decoupled)
    common = {field.name: getattr(layout, field.name) for field in fields(Decoupled)}
    if gpt.embedding_ranks == 1:
        return Decoupled(**common)
    return RowSharded(**common, num_rows=gpt.vocab_size, row_size=gpt.config.model_dim)


def reshape_state(state: TrainState, old: StepSpec, new: StepSpec) -> TrainState:
    """Reshards a state on the host from one spec's shape to another's.

    Master weights and moments keep their values. Unless only the layout of the embedding changes, every expert gets
    replicas in proportion to its previous number of replicas, and the policy's state is initialized anew.

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
    """Converts the slices ``[P, layer, N, E, w]`` of a group to other ranks and stages."""
    before, after = old.layouts[name], new.layouts[name]
    assert isinstance(before, Decoupled)
    assert isinstance(after, Decoupled)
    if name in EMBEDDING_AND_HEAD:  # every stage has a copy, but only one stage uses it
        end = before.classes(slices[{"embedding": 0, "head": -1}[name]], None)
        return _in_all_stages(np.asarray(after.init(end, None))[None], new)
    class_weights = _by_stage(lambda stage_slices: before.classes(stage_slices, None), slices)
    class_weights = _cut_anew(class_weights, old.model_index[name], new.model_index[name])
    return _by_stage(lambda stage_weights: np.asarray(after.init(stage_weights, None)), class_weights)


def _by_stage(function: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray:
    """Applies a function stage by stage; in addition to the result, only one stage's values are in memory."""
    first = function(array[0])
    result = np.empty((len(array), *first.shape), first.dtype)
    result[0] = first
    del first
    for stage in range(1, len(array)):
        result[stage] = function(array[stage])
    return result


def _cut_anew(array: np.ndarray, old_index: np.ndarray, new_index: np.ndarray) -> np.ndarray:
    """Rearranges an array ``[P, layer, ...]`` into the stacks of another cut; padding layers become zeros.

    Args:
        array: stacks of the old cut.
        old_index, new_index: see ``StepSpec.model_index``.
    """
    block_at = np.argwhere(old_index >= 0)  # in model order
    result = np.zeros((*new_index.shape, *array.shape[2:]), array.dtype)
    for stage, layer in np.argwhere(new_index >= 0):
        result[stage, layer] = array[tuple(block_at[new_index[stage, layer]])]
    return result


def _in_all_stages(array: np.ndarray, new: StepSpec) -> np.ndarray:
    """Repeats an array ``[P, ...]`` that is equal in all stages, such as a counter, for the new number of stages."""
    return np.broadcast_to(array[:1], (new.num_stages, *array.shape[1:])).copy()


def _place(placement_PLNS: np.ndarray, old: StepSpec, new: StepSpec) -> tuple[np.ndarray, Any]:
    """Computes the placement ``[P, L, N, S]`` and the policy's state ``[P, ...]`` in the new shape, on the host."""
    num_classes, config = new.experts.num_classes, new.experts
    is_class = placement_PLNS.reshape(*placement_PLNS.shape[:2], -1, 1) == np.arange(num_classes)
    replicas_PLE = is_class.sum(axis=2, dtype=np.int32)
    num_layers = new.num_moe_layers
    init, remembered = new.policy.init(num_layers, num_classes, new.live.num_ranks, config.slots_per_rank)
    stages = _cut_anew(replicas_PLE, old.cut.model_index(True), new.cut.model_index(True))
    placements = [new.policy(jnp.asarray(replicas), init, remembered)[0] for replicas in stages]
    policy = jax.tree.map(lambda leaf: _in_all_stages(np.asarray(leaf)[None], new), remembered)
    return np.stack([np.asarray(placement) for placement in placements]), policy
