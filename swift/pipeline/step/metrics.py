"""Sums over micro-batches, and the metrics of a window's iterations, which are equal on all mesh rows.

Legend: K iterations of the window, L MoE layers, E classes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.experts.layer import Load
from swift.experts.placement.replicas import load_imbalance, replica_counts
from swift.mesh.live import local_row
from swift.mesh.per_rank import EXPERT_AXIS, WORKER_AXIS
from swift.pipeline.state import Index, TrainState
from swift.pipeline.step.spec import StepSpec


class Sums(NamedTuple):
    """Sums over this rank's micro-batches, or over those of all expert ranks after ``over_ranks``."""

    loss: jax.Array  # cross-entropies of tokens, nats, times their weights; at least float32
    aux: jax.Array  # auxiliary losses of micro-batches; at least float32
    tokens: jax.Array  # int32, tokens that are not padding
    weight: Any  # weights of the tokens' losses, at least float32; None if the spec has no weights
    load: Load  # int32[L, E] each, and the router's own numbers, [L, ...] each

    @classmethod
    def zeros(cls, spec: StepSpec, num_iterations: int) -> "Sums":
        """Returns zero sums for each iteration of a window, ``[K, ...]``."""
        load, zero = no_load(spec, num_iterations), jnp.zeros(num_iterations, spec.accumulate_dtype)
        return cls(zero, zero, jnp.zeros(num_iterations, jnp.int32), zero if spec.weighs_tokens else None, load)

    def over_ranks(self) -> "Sums":
        """Returns the sums over all expert ranks."""
        loss, aux, numbers = sum_together((self.loss, self.aux, self.load.numbers), EXPERT_AXIS)
        counts = self.tokens, self.weight, self.load._replace(numbers=())
        tokens, weight, load = jax.tree.map(lambda leaf: lax.psum(leaf, EXPERT_AXIS), counts)
        return Sums(loss, aux, tokens, weight, load._replace(numbers=numbers))

    @property
    def without_numbers(self) -> "Sums":
        """The same sums, without the router's own numbers."""
        return self._replace(load=self.load._replace(numbers=()))


def loss_divisor(tokens: jax.Array, weight: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Returns what sums of losses and gradients are divided by: the weights' sum, or the tokens; 1 if it is 0."""
    if weight is None:
        return jnp.maximum(tokens, 1).astype(dtype)
    return jnp.where(weight > 0, weight, jnp.ones_like(weight)).astype(dtype)


def sum_together(sums: tuple[jax.Array, jax.Array, Any], axes: str | tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Sums losses, auxiliary losses and numbers over mesh axes, in one collective if there are any numbers."""
    if not jax.tree.leaves(sums[2]):
        return lax.psum(sums[0], axes), lax.psum(sums[1], axes), sums[2]
    leaves, tree = jax.tree.flatten(sums)
    dtype, ends = jnp.result_type(*leaves), np.cumsum([leaf.size for leaf in leaves])[:-1]
    flat = lax.psum(jnp.concatenate([leaf.astype(dtype).reshape(-1) for leaf in leaves]), axes)
    parts = zip(jnp.split(flat, ends), leaves, strict=True)
    return jax.tree.unflatten(tree, [part.reshape(leaf.shape) for part, leaf in parts])


def in_model_order(spec: StepSpec, numbers: Any, holding: Index) -> Any:
    """Moves a worker's numbers ``[K, L, ...]`` to their layers in the model; zeros for layers of other workers."""
    if not jax.tree.leaves(numbers):
        return numbers
    index_HL = spec.model_index["router"]
    num_layers = spec.gpt.groups["router"].num_layers
    index_L = jnp.asarray(np.where(index_HL < 0, num_layers, index_HL))[holding]  # padding goes past the end

    def moved(leaf: jax.Array) -> jax.Array:
        zeros = jnp.zeros((len(leaf), num_layers, *leaf.shape[2:]), leaf.dtype)
        return zeros.at[:, index_L].set(leaf, mode="drop")

    return jax.tree.map(moved, numbers)


class UpdateRecord(NamedTuple):
    """Measurements taken during an iteration's update; a window's record has a leading dim K."""

    square_norm: jax.Array  # squared norm of the stage's gradients, before clipping
    learning_rate: jax.Array
    load: Load  # int32[L, E] each, over all micro-batches, ranks and peers
    replicas_LE: jax.Array  # int32, of the placement in use
    imbalance_L: jax.Array

    @classmethod
    def of(cls, spec: StepSpec, state: TrainState, square_norm: Float[Array, ""], load: Load) -> "UpdateRecord":
        """Returns the record of the iteration that starts from ``state``."""
        replicas_LE = replica_counts(state.placement, spec.experts.num_classes)
        imbalance_L = load_imbalance(load.popularity_E, replicas_LE)
        return cls(square_norm, jnp.asarray(spec.learning_rate(state.step)), load, replicas_LE, imbalance_L)


def metrics_of(
    loss_K: Float[Array, " K"],
    aux_K: Float[Array, " K"],
    tokens_K: Int[Array, " K"],
    weight_K: Float[Array, " K"] | None,
    norm_K: Float[Array, " K"],
    record: UpdateRecord,
    numbers: Any = (),
) -> dict[str, Any]:
    """Computes the metrics of a window.

    Args:
        loss_K: cross-entropies, summed over the global batch's tokens with their weights, nats.
        aux_K: auxiliary losses, summed over all layers and averaged over micro-batches.
        tokens_K: int32, tokens that are not padding.
        weight_K: sum of the losses' weights, or None without weights.
        norm_K: norm of the whole model's gradient, before clipping.
        record: record of the updates of all stages, with a leading dim K.
        numbers: the router's own numbers by name, ``[K, L, ...]`` each, summed over all ranks of all workers.
    """
    own: dict[str, Any] = {"numbers": {name: number.value for name, number in numbers.items()}} if numbers else {}
    own |= {} if weight_K is None else {"loss_weight": weight_K}
    return own | {
        "loss": loss_K / loss_divisor(tokens_K, weight_K, loss_K.dtype),
        "aux_loss": aux_K,
        "tokens": tokens_K,
        "grad_norm": norm_K,
        "learning_rate": record.learning_rate,
        "popularity": record.load.popularity_E,
        "dropped": record.load.dropped_E,
        "overflowed": record.load.overflowed_E,
        "replicas": record.replicas_LE,
        "load_imbalance": record.imbalance_L,
    }


def over_stages(spec: StepSpec, record: UpdateRecord) -> UpdateRecord:
    """Joins the records of all workers' layers in model order, per rank; leaves have leading dims K and L."""
    live = spec.live
    if live.num_live == 1:
        return record
    worker, layer = spec.locations("expert") if "expert" in spec.gpt.groups else (np.zeros(0, int),) * 2

    def joined(own_KL: jax.Array) -> jax.Array:
        return jnp.moveaxis(lax.all_gather(own_KL, WORKER_AXIS)[worker, :, layer], 0, 1)

    by_layer = jax.tree.map(joined, (record.load, record.replicas_LE, record.imbalance_L))
    return UpdateRecord(record.square_norm, record.learning_rate, *by_layer)


def by_iteration(metrics: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    """Fetches the metrics ``[worker, K, ...]`` of a step function to the host, as one dict for each iteration.

    ``popularity``, ``dropped``, ``overflowed`` and ``replicas`` are [L, E]; ``load_imbalance`` becomes its mean over
    the layers; ``numbers``, if there are any, is a dict of the router's own, [L, ...] each.
    """
    host = local_row(metrics)
    imbalance_KL = host["load_imbalance"]
    host["load_imbalance"] = imbalance_KL.mean(axis=1) if imbalance_KL.size else np.ones(len(imbalance_KL))
    return [jax.tree.map(lambda value_K: value_K[k], host) for k in range(len(imbalance_KL))]  # noqa: B023


def no_load(spec: StepSpec, *lead: int) -> Load:
    """Returns zero counts, int32[*lead, L, E], and zero numbers ``[*lead, L, ...]``."""
    counts = jnp.zeros((*lead, spec.num_moe_layers, spec.experts.num_classes), jnp.int32)
    numbers = jax.tree.map(
        lambda leaf: jnp.zeros((*lead, spec.num_moe_layers, *leaf.shape), spec.accumulate_dtype), spec.number_shapes
    )
    return Load(counts, counts, counts, numbers)
