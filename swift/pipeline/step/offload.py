"""The update of optimizer slices that are in host memory: one layer at a time is on the device.

A layer's master weights and moments are copied to the device, updated, and copied back to where they were; the master
weights in the type of slots stay, to fill these. The layers of a group of parameters are alike: a loop over them is one
program, whatever their number.

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
    """State of some layers, as an update reads and writes it; see ``TrainState``."""

    master: dict[str, Any]  # {group: [L, ...]}
    moments: Any  # {group: [L, ...]}, or several of these, and counters []


class LayerGradients(NamedTuple):
    """Gradients of some layers, counts and placements, in device memory."""

    gradients: Mapping[str, Any]  # {group: [L, ...]}, of the master weights
    popularity_LE: Int[Array, "L E"]
    before_LNS: Int[Array, "L N S"]  # the placement that the gradients were computed with
    after_LNS: Int[Array, "L N S"]  # the placement of the next iteration


_Update = Callable[[LayerState, LayerGradients], LayerState]


def update_layer_by_layer(
    update: _Update, state: LayerState, layer_gradients: LayerGradients, dtype: DTypeLike
) -> tuple[LayerState, dict[str, Any]]:
    """Updates one layer of one group after the other.

    Args:
        update: update of layers of some groups, in device memory; counters do not depend on which.
        state: state of this rank, whose arrays are in any memory.
        layer_gradients: gradients of all groups.
        dtype: type of slots.

    Returns:
        The state after the update, in the memory that it was in; and the master weights by group for filling slots,
        in the type of these and in device memory.
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
    """Whether all arrays of a tree but counters are in dicts by group."""
    ungrouped = _map_groups(lambda _: {}, groups, tree)
    return all(leaf.ndim == 0 for leaf in jax.tree.leaves(ungrouped))


def _map_groups(f: Callable[..., Any], groups: Collection[str], tree: Any, *other_trees: Any) -> Any:
    """Maps dicts by group, which are anywhere in trees; of everything else it keeps that of the first tree."""

    def is_by_group(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == set(groups)

    def mapped(node: Any, *nodes: Any) -> Any:
        return f(node, *nodes) if is_by_group(node) else node

    return jax.tree.map(mapped, tree, *other_trees, is_leaf=is_by_group)


def _updated_group(
    update: _Update, state: LayerState, layer_gradients: LayerGradients, dtype: DTypeLike
) -> tuple[LayerState, dict[str, Any]]:
    """Updates the layers of the only group that there is."""
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
    """One layer of the gradients; of counts and placements, too, where the group is one of MoE layers."""
    if has_experts:
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index, 1), layer_gradients)
    ((name, stack),) = layer_gradients.gradients.items()
    return layer_gradients._replace(gradients={name: lax.dynamic_slice_in_dim(stack, index, 1)})


def _fetched(stack: jax.Array, index: jax.Array) -> jax.Array:
    return jax.device_put(lax.dynamic_slice_in_dim(stack, index, 1), jax.memory.Space.Device)


def _put_back(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    memory = jax.typeof(stack).memory_space
    return lax.dynamic_update_slice_in_dim(stack, jax.device_put(layer, memory), index, 0)
