"""U on one rank: reduces slot gradients to gradients of master weights, then updates weights, placement and slots.

U has two halves, before and after the norm of the whole model's gradient is known: ``reduce_gradients`` and
``apply_gradients``. Both are the same for a single worker and for a worker in a pipeline. On a worker with several
chunks, they are called once per chunk, with the layers of this chunk.

Legend: L MoE layers of the chunk, E expert classes, N ranks, S slots.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from swift.mesh.peer_sum import PeerAllReduce
from swift.mesh.per_rank import EXPERT_AXIS, WORKER_AXIS
from swift.pipeline import scopes
from swift.pipeline.state import EMBEDDING_AND_HEAD, Index, TrainState
from swift.pipeline.step.offload import LayerGradients, LayerState, update_layer_by_layer
from swift.pipeline.step.spec import StepSpec, SumInRound


class EmbeddingAndHead(NamedTuple):
    """Whether a chunk is the model's first or last, bool[] each; the same on all ranks of a worker."""

    is_first: jax.Array | bool
    is_last: jax.Array | bool

    @classmethod
    def of(cls, spec: StepSpec, chunk: Index) -> "EmbeddingAndHead":
        """Compares a chunk, which may be data, with the first and the last chunk."""
        return cls(chunk == 0, chunk == len(spec.chunks.sizes) - 1)


def cond_unless_static(
    is_so: jax.Array | bool, compute: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any
) -> Any:
    """Calls one of two functions: directly if the condition is static, otherwise with ``lax.cond``."""
    if isinstance(is_so, bool):
        return (compute if is_so else otherwise)(*operands)
    return lax.cond(is_so, compute, otherwise, *operands)


def _used(
    spec: StepSpec, name: str, ends: EmbeddingAndHead, compute: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    """Calls ``compute``, or ``otherwise`` for an embedding or head that the chunk does not use."""
    if name not in EMBEDDING_AND_HEAD or len(spec.chunks.sizes) == 1:
        return compute()
    if name == "embedding" and spec.ties_stages:
        return compute()
    return cond_unless_static(ends.is_first if name == "embedding" else ends.is_last, compute, otherwise)


@jax.named_scope(scopes.UPDATE)
def reduce_gradients(
    spec: StepSpec,
    state: TrainState,
    gradients: dict[str, jax.Array],
    divisor: Float[Array, ""],
    ends: EmbeddingAndHead,
    peer_sum: PeerAllReduce | SumInRound,
) -> dict[str, jax.Array]:
    """Reduces this rank's slot gradients to mean gradients of its master weights, the same on all peers.

    Gradients are summed over replicas, expert ranks and peers, and divided once, at the end.

    Args:
        spec: step spec.
        state: this rank's state, with the placement under which the gradients were computed.
        gradients: gradients of the stage's weights, ``[layer, slot, size]`` by group, summed over the micro-batches
            that this worker ran.
        divisor: tokens of the global batch.
        ends: whether the chunk is the first or the last.
        peer_sum: sum over the workers that hold the same blocks.

    Returns:
        Gradients by group, in the layout of the master weights.
    """
    placements = spec.placements(state.placement, state.master)

    def reduce(name: str, packed: jax.Array) -> jax.Array:
        def collect() -> jax.Array:
            return spec.layouts[name].collect(packed, placements[name])

        def none() -> jax.Array:
            like = state.master[name]
            return jnp.zeros(like.shape, like.dtype)  # in device memory, even if the master weights are not

        with jax.named_scope(f"{scopes.COLLECT}/{name}"):
            local_sum = _used(spec, name, ends, collect, none)
        with jax.named_scope(f"{scopes.PEERS}/{name}"):
            # A tree involves all rows, so it must not be inside a branch that only some rows take.
            if peer_sum.is_tree:
                return peer_sum(local_sum) / divisor
            return _used(spec, name, ends, lambda: peer_sum(local_sum), lambda: local_sum) / divisor

    return {name: reduce(name, packed) for name, packed in gradients.items()}


@jax.named_scope(scopes.UPDATE)
def reduce_tied(
    spec: StepSpec, state: TrainState, packed: jax.Array, divisor: Float[Array, ""]
) -> dict[str, jax.Array]:
    """Reduces a tied embedding's gradients over all workers, each of which updates its own copy.

    Args:
        spec: step spec.
        state: this rank's state.
        packed: gradients of the embedding, ``[layer, slot, size]``, summed over the micro-batches of this worker.
        divisor: tokens of the global batch.

    Returns:
        The gradient under its group's name, in the layout of the master weights.
    """
    placement = spec.placements(state.placement, state.master)["embedding"]
    with jax.named_scope(f"{scopes.COLLECT}/embedding"):
        local_sum = spec.layouts["embedding"].collect(packed, placement)
    with jax.named_scope(f"{scopes.PEERS}/embedding"):
        total = lax.psum(local_sum, WORKER_AXIS) if spec.live.num_live > 1 else local_sum
        return {"embedding": total / divisor}


@jax.named_scope(scopes.UPDATE)
def square_norm(
    spec: StepSpec, gradients: dict[str, jax.Array], placement_LNS: Int[Array, "L N S"]
) -> Float[Array, ""]:
    """Computes the squared norm of the stage's gradients; every expert counts once, however many replicas it has."""
    placements = spec.placements(placement_LNS, gradients)
    squares = [spec.layouts[name].square_norm(g, placements[name]) for name, g in gradients.items()]
    return lax.psum(sum(squares), EXPERT_AXIS)


def clip_scale(spec: StepSpec, norm: Float[Array, ""]) -> Float[Array, ""] | None:
    """Computes the factor that clips gradients to the largest allowed norm, or returns None without clipping."""
    if spec.clip_norm is None:
        return None
    return jnp.minimum(1, spec.clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


@jax.named_scope(scopes.UPDATE)
def apply_gradients(
    spec: StepSpec,
    state: TrainState,
    gradients: dict[str, jax.Array],
    popularity_LE: Int[Array, "L E"],
    ends: EmbeddingAndHead,
    scale: Float[Array, ""] | None = None,
) -> TrainState:
    """Computes the state of the next iteration: updates master weights, places experts, and fills slots.

    Args:
        spec: step spec.
        state: this rank's state.
        gradients: gradients of the master weights, by group.
        popularity_LE: int32, tokens routed to each expert, summed over all micro-batches, ranks and peers.
        ends: see ``reduce_gradients``.
        scale: factor by which the gradients are multiplied, or None for 1.
    """
    placement, policy = state.placement, state.policy
    if spec.num_moe_layers:
        placement, policy = spec.policy(popularity_LE, placement, policy)
    layer_gradients = LayerGradients(gradients, popularity_LE, state.placement, placement)
    layer_state, update = LayerState(state.master, state.moments), partial(_update_layers, spec, scale)
    if spec.memory == "device":
        after = update(layer_state, layer_gradients)
        weights = after.master
    else:
        after, weights = update_layer_by_layer(update, layer_state, layer_gradients, spec.compute_dtype)
    placements = spec.placements(placement, weights)

    def fill(name: str) -> jax.Array:
        with jax.named_scope(f"{scopes.MATERIALIZE}/{name}"):
            full = partial(spec.layouts[name].materialize, weights[name], placements[name])
            return _used(spec, name, ends, full, lambda: state.slots[name])

    slots = {name: fill(name) for name in weights}
    return TrainState(state.step + 1, after.master, after.moments, slots, placement, policy)


def _update_layers(
    spec: StepSpec, scale: jax.Array | None, state: LayerState, layer_gradients: LayerGradients
) -> LayerState:
    """Updates layers in some groups, or in all groups."""
    gradients = (
        layer_gradients.gradients if scale is None else jax.tree.map(lambda g: g * scale, layer_gradients.gradients)
    )
    trees = gradients, state.moments, state.master, _decayed(spec, state.master)
    # The optimizer is elementwise, so it can work on the shapes in which a step receives and returns its state. If an
    # update writes other shapes, XLA:CPU copies the whole state before and after it, even if they differ only by dims
    # of 1. A pipeline does not do this, since a window's updates would no longer be bit-identical to those of single
    # iterations.
    if spec.is_single_worker:
        master, moments = _without_mesh_dims(_optimized(spec, *_with_mesh_dims(trees)))
    else:
        master, moments = _optimized(spec, *trees)
    master = _with_router_states(spec, master, state.master, layer_gradients.popularity_LE)
    if "expert" in master:
        master, moments = _migrate(spec, (master, moments), layer_gradients.before_LNS, layer_gradients.after_LNS)
    return LayerState(master, moments)


def _optimized(spec: StepSpec, gradients: Any, moments: Any, master: Any, decayed: Any) -> tuple[Any, Any]:
    """Runs the optimizer: returns new master weights and moments."""
    updates, moments = spec.optimizer.update(gradients, moments, decayed)
    return optax.apply_updates(master, updates), moments


def _with_mesh_dims(tree: Any) -> Any:
    """Reshapes arrays ``[L, ...]`` to shards ``[1, L, 1, ...]`` of RANKED arrays; scalars stay as they are."""
    return jax.tree.map(lambda leaf: leaf[None, :, None] if leaf.ndim else leaf, tree)


def _without_mesh_dims(tree: Any) -> Any:
    """Inverts ``_with_mesh_dims``."""
    return jax.tree.map(lambda leaf: leaf[0, :, 0] if leaf.ndim else leaf, tree)


def _decayed(spec: StepSpec, master: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the master weights that the optimizer uses for weight decay: zeros where nothing decays."""
    if not spec.decays_matrices_only:
        return master

    def matrices(name: str, leaf: jax.Array) -> jax.Array:
        width = leaf.shape[-1]
        position_w = spec.layouts[name].first_position(width) + jnp.arange(width)
        in_matrix_w = spec.gpt.groups[name].in_matrix(position_w)
        return jnp.where(jnp.broadcast_to(in_matrix_w, leaf.shape), leaf, 0)

    decayed = {name: matrices(name, leaf) for name, leaf in master.items() if name != "embedding"}
    return {name: decayed.get(name, jnp.zeros_like(leaf)) for name, leaf in master.items()}


def _with_router_states(
    spec: StepSpec, master: dict[str, jax.Array], before: Mapping[str, jax.Array], popularity_LE: jax.Array
) -> dict[str, jax.Array]:
    """Replaces what the optimizer made of the routers' states by the states that the router computes."""
    router, num_classes = spec.experts.router, spec.experts.num_classes
    initial = router.init_state(num_classes)
    if "router" not in master or not initial:
        return master
    leaf, group, width = master["router"], spec.gpt.groups["router"], master["router"].shape[-1]
    first, spans = spec.layouts["router"].first_position(width), {name: group.span(name) for name in initial}
    joined_LX = _gathered(before["router"], first, list(spans.values()))
    ends = np.cumsum([stop - start for start, stop in spans.values()])[:-1]
    old = {
        name: part_LX.reshape(len(leaf), *initial[name].shape)
        for name, part_LX in zip(initial, jnp.split(joined_LX, ends, axis=1), strict=True)
    }
    position_w = first + jnp.arange(width)
    for name, new in jax.vmap(router.update_state)(old, popularity_LE).items():
        start, stop = spans[name]
        new_Lw = new.astype(leaf.dtype).reshape(len(leaf), -1)[:, jnp.clip(position_w - start, 0, stop - start - 1)]
        is_state_w = (position_w >= start) & (position_w < stop)
        new_leaf = new_Lw.reshape(len(leaf), *[1] * (leaf.ndim - 2), width)
        leaf = jnp.where(jnp.broadcast_to(is_state_w, leaf.shape), new_leaf, leaf)
    return master | {"router": leaf}


def _gathered(slices: jax.Array, first: jax.Array | int, spans: Sequence[tuple[int, int]]) -> jax.Array:
    """Gathers ranges ``[L, X]`` of a dense group's parameters, whose slices are on different ranks: one small sum."""
    slices_Lw = slices.reshape(len(slices), -1)
    position_X = jnp.asarray(np.concatenate([np.arange(*span) for span in spans]), jnp.int32) - first
    is_here_X = (position_X >= 0) & (position_X < slices_Lw.shape[1])
    values_LX = slices_Lw[:, jnp.clip(position_X, 0, slices_Lw.shape[1] - 1)]
    return lax.psum(jnp.where(is_here_X, values_LX, jnp.zeros_like(values_LX)), EXPERT_AXIS)


def _migrate(spec: StepSpec, tree: Any, old_LNS: jax.Array, new_LNS: jax.Array) -> Any:
    """Moves the experts' master weights and moments to a new placement, if their layout depends on the placement."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    is_expert = [jax.tree_util.DictKey("expert") in path for path, _ in leaves]
    experts = [leaf for (_, leaf), is_moved in zip(leaves, is_expert, strict=True) if is_moved]
    moved = iter(spec.layouts["expert"].migrate(experts, old_LNS, new_LNS))
    merged = [next(moved) if is_moved else leaf for (_, leaf), is_moved in zip(leaves, is_expert, strict=True)]
    return jax.tree.unflatten(treedef, merged)
