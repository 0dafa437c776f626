"""Update of optimizer slices in host memory, with one layer at a time on the device.

A layer's master weights and moments are copied to the device, updated, and copied back to their memory; the master
weights, cast to the slots' dtype, stay on the device to fill the slots. All layers of a group of parameters have the
same shapes, so a loop over them is one program, whatever their number.

Legend: L layers of a group, or MoE layers, E expert classes, N ranks, S slots.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from swift.pipeline.state import KINDS


class LayerState(NamedTuple):
    """State of some layers for an update; see ``TrainState``."""

    master: dict[str, Any]  # {group: [L, ...]}
    moments: Any  # {group: [L, ...]}, or several such dicts, and counters []


class LayerGradients(NamedTuple):
    """Gradients, counts and placements of some layers, in device memory."""

    gradients: Mapping[str, Any]  # {group: [L, ...]}, of the master weights
    popularity_LE: Int[Array, "L E"]
    before_LNS: Int[Array, "L N S"]  # placement under which the gradients were computed
    after_LNS: Int[Array, "L N S"]  # placement of the next iteration


_Update = Callable[[LayerState, LayerGradients], LayerState]


def update_layer_by_layer(
    update: _Update, state: LayerState, layer_gradients: LayerGradients, dtype: DTypeLike
) -> tuple[LayerState, dict[str, Any]]:
    """Updates the layers of all groups, one after the other.

    Args:
        update: function that updates the layers of some groups in device memory; it must update counters identically
            for every group.
        state: state of this rank, in any memory.
        layer_gradients: gradients of all groups.
        dtype: dtype of the slots.

    Returns:
        (the state after the update, in its previous memory; the master weights by group for filling slots, in the
        slots' dtype and in device memory).
    """
    names = list(state.master)

    def update_group(name: str) -> tuple[LayerState, dict[str, Any]]:
        group_state = _map_groups(lambda groups: {name: groups[name]}, names, state)
        return _updated_group(
            update, group_state, layer_gradients._replace(gradients={name: layer_gradients.gradients[name]}), dtype
        )

    def joined(*parts: dict[str, Any]) -> dict[str, Any]:
        return {name: leaf for part in parts for name, leaf in part.items()}

    return _map_groups(joined, names[:1], *map(update_group, names))


def is_grouped_like_params(tree: Any, groups: Collection[str]) -> bool:
    """Whether all arrays in a tree, except scalars such as counters, are in dicts by group."""
    ungrouped = _map_groups(lambda _: {}, groups, tree)
    return all(leaf.ndim == 0 for leaf in jax.tree.leaves(ungrouped))


def _map_groups(f: Callable[..., Any], groups: Collection[str], tree: Any, *other_trees: Any) -> Any:
    """Maps the dicts by group anywhere in the trees; all other leaves are taken from the first tree."""

    def is_by_group(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == set(groups)

    def mapped(node: Any, *nodes: Any) -> Any:
        return f(node, *nodes) if is_by_group(node) else node

    return jax.tree.map(mapped, tree, *other_trees, is_leaf=is_by_group)


def _updated_group(
    update: _Update, state: LayerState, layer_gradients: LayerGradients, dtype: DTypeLike
) -> tuple[LayerState, dict[str, Any]]:
    """Updates the layers of a state with a single group."""
    ((name, stack),) = state.master.items()

    def update_layer(index: jax.Array, carry: tuple[LayerState, jax.Array]) -> tuple[LayerState, jax.Array]:
        now, weights = carry
        layer_state = jax.tree.map(lambda old, leaf: _fetched(leaf, index) if old.ndim else old, state, now)
        after = update(layer_state, _layer(layer_gradients, index, has_experts=KINDS.get(name) is True))
        weights = lax.dynamic_update_slice_in_dim(weights, after.master[name].astype(dtype), index, 0)
        return jax.tree.map(lambda old, new: _put_back(old, new, index) if old.ndim else new, now, after), weights

    after, weights = lax.fori_loop(0, len(stack), update_layer, (state, jnp.zeros(stack.shape, dtype)))
    return after, {name: weights}


def _layer(layer_gradients: LayerGradients, index: jax.Array, *, has_experts: bool) -> LayerGradients:
    """Returns one layer's gradients and, for a group of MoE layers, its counts and placements."""
    if has_experts:
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index, 1), layer_gradients)
    ((name, stack),) = layer_gradients.gradients.items()
    return layer_gradients._replace(gradients={name: lax.dynamic_slice_in_dim(stack, index, 1)})


def _fetched(stack: jax.Array, index: jax.Array) -> jax.Array:
    return jax.device_put(lax.dynamic_slice_in_dim(stack, index, 1), jax.memory.Space.Device)


def _put_back(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    memory = jax.typeof(stack).memory_space
    return lax.dynamic_update_slice_in_dim(stack, jax.device_put(layer, memory), index, 0)
