"""One training iteration, as one rank sees it.

Micro-batches one after another: forward and backward, gradients of the slots added up. Then once: collect, divide,
clip, update the master weights, place the experts by this iteration's popularity, materialize the new slots.

Legend: M micro-batches, B sequences of this rank, T positions, D model dim, L MoE layers, E classes, N ranks, S slots.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from swift.data import Batch
from swift.experts import Load, expert_parallel_moe
from swift.experts.placement import load_imbalance, replica_counts
from swift.mesh import EXPERT_AXIS, RANKED, SHARED
from swift.models import Weights
from swift.train.state import Program, TrainState, materialize_all


class Sums(NamedTuple):
    """Sums over micro-batches; this rank's until ``over_ranks``, then everyone's."""

    loss: jax.Array  # cross-entropies of tokens, nats
    aux: jax.Array  # auxiliary losses of micro-batches
    tokens: jax.Array  # int32, tokens with a loss
    load: Load  # int32[L, E] each

    def over_ranks(self) -> "Sums":
        """The sums over all expert ranks."""
        return jax.tree.map(lambda leaf: lax.psum(leaf, EXPERT_AXIS), self)


def forward(program: Program, weights: Weights, placement_LNS: jax.Array, batch: Any) -> Sums:
    """Runs one micro-batch ``[B, T]`` of this rank through the model."""
    gpt, experts = program.gpt, program.gpt.groups.get("expert")

    def moe(row: int, logits_TE: jax.Array, x_TD: jax.Array, valid_T: jax.Array, state: Any) -> Any:
        assert experts is not None
        return expert_parallel_moe(
            program.experts,
            logits_TE,
            x_TD,
            valid_T,
            placement_LNS[row],
            lambda rows: experts.apply_stacked(state, rows),
        )

    x = gpt.embed(weights, batch.inputs)
    x, aux, loads = gpt.stage(weights, gpt.config.moe_layers, x, batch.valid, moe)
    loss = gpt.head_loss(weights, x, batch.labels, batch.valid)
    none = jnp.zeros((0, program.experts.num_classes), jnp.int32)
    load = jax.tree.map(lambda *rows: jnp.stack(rows), *loads) if loads else Load(none, none)
    return Sums(loss, aux, batch.valid.sum(dtype=jnp.int32), load)


def compute_gradients(program: Program, state: TrainState, batch: Batch) -> tuple[dict[str, jax.Array], Sums]:
    """Gradients of loss and auxiliary loss over all micro-batches, in each group's master layout.

    The objective is the mean cross-entropy of the global batch's tokens plus the auxiliary loss's mean over
    micro-batches. Local sums are differentiated and reduced by hand; the division comes last and once.

    Args:
        program: the static part.
        state: this rank's state.
        batch: this rank's sequences of every micro-batch, ``[M, B, T]``.

    Returns:
        (gradients by group, sums over ranks and micro-batches).
    """
    weights = program.gpt.unpack(state.slots)
    num_microbatches = batch.inputs.shape[0]
    tokens = lax.psum(batch.valid.sum(dtype=jnp.int32), EXPERT_AXIS)
    accumulate_dtype = jnp.promote_types(program.compute_dtype, jnp.float32)
    divisor = jnp.maximum(tokens, 1).astype(accumulate_dtype)
    aux_weight = program.experts.aux_loss_coefficient * divisor / num_microbatches

    def objective(weights: Weights, microbatch: Batch) -> tuple[jax.Array, Sums]:
        sums = forward(program, weights, state.placement, microbatch)
        return sums.loss + aux_weight * sums.aux, sums

    def add(total: Any, microbatch: Batch) -> tuple[Any, None]:
        gradients, sums = jax.grad(objective, has_aux=True)(weights, microbatch)
        widened = jax.tree.map(lambda total, g: total + g.astype(total.dtype), total[0], gradients)
        return (widened, jax.tree.map(jnp.add, total[1], sums)), None

    zero_gradients = jax.tree.map(lambda w: jnp.zeros(w.shape, accumulate_dtype), weights)
    shapes = jax.eval_shape(lambda: objective(weights, jax.tree.map(lambda leaf: leaf[0], batch))[1])
    zero_sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (gradients, sums), _ = lax.scan(add, (zero_gradients, zero_sums), batch)

    placements = program.placements(state.placement)
    collected = {
        name: program.layouts[name].collect(packed, placements[name]) / divisor
        for name, packed in program.gpt.pack(gradients).items()
    }
    return collected, sums.over_ranks()


def global_norm(program: Program, gradients: dict[str, jax.Array], placement_LNS: jax.Array) -> jax.Array:
    """The norm of the whole model's gradient, every class counted once."""
    placements = program.placements(placement_LNS)
    parts = [program.layouts[name].square_norm(g, placements[name]) for name, g in gradients.items()]
    return jnp.sqrt(lax.psum(sum(parts), EXPERT_AXIS))


def apply_gradients(
    program: Program, state: TrainState, gradients: dict[str, jax.Array], popularity_LE: jax.Array
) -> tuple[TrainState, jax.Array]:
    """Clip, update, place, materialize: the new state, and the gradient's norm before the clip."""
    norm = global_norm(program, gradients, state.placement)
    if program.clip_norm is not None:
        scale = jnp.minimum(1, program.clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        gradients = jax.tree.map(lambda g: g * scale, gradients)
    updates, moments = program.optimizer.update(gradients, state.moments, state.master)
    master = optax.apply_updates(state.master, updates)

    placement, policy = state.placement, state.policy
    if program.num_moe_layers:
        placement, policy = program.policy(popularity_LE, placement, policy)
        master, moments = _migrate(program, (master, moments), state.placement, placement)
    slots = materialize_all(program, master, placement)
    return TrainState(state.step + 1, master, moments, slots, placement, policy), norm


def _migrate(program: Program, tree: Any, old_LNS: jax.Array, new_LNS: jax.Array) -> Any:
    """Moves the experts' part of master weights and moments to a new placement, where their layout ties them to it."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    is_expert = [jax.tree_util.DictKey("expert") in path for path, _ in leaves]
    experts = [leaf for (_, leaf), mine in zip(leaves, is_expert, strict=True) if mine]
    moved = iter(program.layouts["expert"].migrate(experts, old_LNS, new_LNS))
    merged = [next(moved) if mine else leaf for (_, leaf), mine in zip(leaves, is_expert, strict=True)]
    return jax.tree.unflatten(treedef, merged)


def train_step(program: Program) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted iteration: (state, batch ``[worker, M, rank, B, T]``) -> (state, metrics ``[worker, ...]``).

    The old state's buffers are given up. Metrics: ``loss`` and ``aux_loss`` (means), ``tokens``, ``grad_norm``,
    ``learning_rate``, ``load_imbalance`` (mean over layers), and by layer and class ``popularity``, ``dropped`` and
    ``replicas`` (of the placement used).
    """

    def per_rank(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        gradients, sums = compute_gradients(program, state, batch)
        after, norm = apply_gradients(program, state, gradients, sums.load.popularity_E)
        replicas_LE = replica_counts(state.placement, program.experts.num_classes)
        imbalance_L = load_imbalance(sums.load.popularity_E, replicas_LE)
        metrics = {
            "loss": sums.loss / jnp.maximum(sums.tokens, 1).astype(sums.loss.dtype),
            "aux_loss": sums.aux / batch.inputs.shape[0],
            "tokens": sums.tokens,
            "grad_norm": norm,
            "learning_rate": program.schedule(state.step),
            "popularity": sums.load.popularity_E,
            "dropped": sums.load.dropped_E,
            "replicas": replicas_LE,
            "load_imbalance": imbalance_L.mean() if program.num_moe_layers else jnp.ones(()),
        }
        return after, metrics

    run = program.live.per_rank(per_rank, (program.specs, RANKED), (program.specs, SHARED))
    # Named, so that the state of the first call, of a restore and of a previous call all meet the same program.
    state, batch, metrics = map(program.live.shardings, (program.specs, RANKED, SHARED))
    return jax.jit(run, in_shardings=(state, batch), out_shardings=(state, metrics), donate_argnums=0)


def evaluate_step(program: Program) -> Callable[[TrainState, Batch], Sums]:
    """The jitted sums ``[worker]`` of one batch on unchanged weights; validation drops tokens as training does."""

    def per_rank(state: TrainState, batch: Batch) -> Sums:
        weights = program.gpt.unpack(state.slots)
        sums = lax.map(lambda microbatch: forward(program, weights, state.placement, microbatch), batch)
        return jax.tree.map(lambda leaf: leaf.sum(axis=0, dtype=leaf.dtype), sums).over_ranks()

    return jax.jit(program.live.per_rank(per_rank, (program.specs, RANKED), SHARED))
