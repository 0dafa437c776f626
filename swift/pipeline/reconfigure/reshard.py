"""A state on other ranks, slots or stages: the numbers of every class stay, bit for bit, and are cut anew.

On the host, in the layout of a checkpoint: RANKED ``[P, row, N, ...]`` and SHARED ``[P, ...]``, without slots.

Legend: P stages, L MoE layers of a stage, N ranks, S slots of a rank, E classes, W numbers of a class, w = W / N.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swift.experts import Decoupled, padded_size
from swift.mesh import storage_mesh
from swift.pipeline.runtime import EMBEDDING_AND_HEAD, StepSpec, TrainState
from swift.topology import Topology


@dataclass(frozen=True)
class StateShape:
    """What the shapes of a state depend on beside the model.

    Attributes:
        num_stages: P.
        num_ranks: N.
        slots_per_rank: S.
    """

    num_stages: int
    num_ranks: int
    slots_per_rank: int

    @classmethod
    def of(cls, spec: StepSpec) -> "StateShape":
        """Of a program's state."""
        return cls(spec.num_stages, spec.live.num_ranks, spec.experts.slots_per_rank)

    def to_json(self) -> dict[str, int]:
        """Numbers by name; the inverse is ``StateShape(**said)``."""
        return asdict(self)


def reshaped(spec: StepSpec, shape: StateShape) -> StepSpec:
    """The program of the same model for a state of another shape, on one device: it says what is where, and runs not.

    Optimizer state that is tied to places (the layout ``coupled``) has one shape only.
    """
    if shape == StateShape.of(spec):
        return spec
    layouts = {}
    for name, layout in spec.layouts.items():
        assert isinstance(layout, Decoupled), "only what every rank has a slice of can be cut anew"
        layouts[name] = replace(layout, num_ranks=shape.num_ranks)
    return replace(
        spec,
        live=storage_mesh(Topology(1, shape.num_stages, shape.num_ranks)),
        experts=replace(spec.experts, slots_per_rank=shape.slots_per_rank),
        layouts=layouts,
        row_shapes=None,  # type: ignore[arg-type]
    )


def reshape_state(state: TrainState, old: StepSpec, new: StepSpec) -> TrainState:
    """The state of ``old``, on the host, as ``new`` has it.

    Master weights and moments keep their numbers. Every class gets replicas by those that it had, which the popularity
    gave it; what a policy remembers begins anew.

    Args:
        state: of ``old``, without slots.
        old: a program.
        new: one of the same model, see ``reshaped``.
    """
    if StateShape.of(old) == StateShape.of(new):
        return state

    def recut(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return _recut(names[-1], leaf, old, new) if names else _in_all_stages(leaf, new)

    master, moments = jax.tree_util.tree_map_with_path(recut, (state.master, state.moments))
    placement, policy = _place(state.placement, new)
    return TrainState(_in_all_stages(state.step, new), master, moments, {}, placement, policy)


def _recut(name: str, slices: np.ndarray, old: StepSpec, new: StepSpec) -> np.ndarray:
    """The slices ``[P, row, N, E, w]`` of a group on other ranks and stages."""
    num_stages, num_rows, _, num_classes, _ = slices.shape
    whole = slices.swapaxes(2, 3).reshape(num_stages, num_rows, num_classes, -1)[..., : old.gpt.groups[name].size]
    if name in EMBEDDING_AND_HEAD:  # of which all stages have a copy, and one uses its own
        end = whole[{"embedding": 0, "head": -1}[name]]
        whole = np.broadcast_to(end, (new.num_stages, *end.shape))
    else:
        whole = whole.reshape(new.num_stages, -1, *whole.shape[2:])
    ranks = new.live.num_ranks
    padding = padded_size(whole.shape[-1], ranks) - whole.shape[-1]
    padded = np.pad(whole, ((0, 0), (0, 0), (0, 0), (0, padding)))
    return np.ascontiguousarray(padded.reshape(*whole.shape[:3], ranks, -1).swapaxes(2, 3))


def _in_all_stages(counter: np.ndarray, new: StepSpec) -> np.ndarray:
    """A counter ``[P]``, which all stages agree on."""
    return np.broadcast_to(counter[:1], (new.num_stages, *counter.shape[1:])).copy()


def _place(placement_PLNS: np.ndarray, new: StepSpec) -> tuple[np.ndarray, Any]:
    """The placement ``[P, L, N, S]`` and the policy's state ``[P, ...]`` in the new shape, on the host."""
    num_classes, config = new.experts.num_classes, new.experts
    is_class = placement_PLNS.reshape(-1, math.prod(placement_PLNS.shape[2:]), 1) == np.arange(num_classes)
    replicas_LE = is_class.sum(axis=1, dtype=np.int32)
    num_layers = new.num_moe_layers
    init, remembered = new.policy.init(num_layers, num_classes, new.live.num_ranks, config.slots_per_rank)
    stages = replicas_LE.reshape(new.num_stages, num_layers, num_classes)
    placements = [new.policy(jnp.asarray(replicas), init, remembered)[0] for replicas in stages]
    policy = jax.tree.map(lambda leaf: _in_all_stages(np.asarray(leaf)[None], new), remembered)
    return np.stack([np.asarray(placement) for placement in placements]), policy
