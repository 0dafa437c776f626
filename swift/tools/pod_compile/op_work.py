"""Floating-point operations and memory traffic of the ops of a step, on one rank, before anything is compiled.

Only matmuls are counted, with their inputs and outputs, plus accumulated and stashed values; everything else is assumed
to be fused with them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from swift.data import Batch
from swift.mesh import EXPERT_AXIS, Chip
from swift.models import Weights
from swift.pipeline import StepSpec, scopes, split_stage, stash_bytes
from swift.pipeline.runtime import forward
from swift.pipeline.split_backward import dot_bytes, dot_flops

HEAD, EMBEDDING = "head", "embedding"
"""Additional work: of the last stage's F for the loss, its gradient and the head's; of the first stage's B for the
gradient of the embedding."""


@dataclass(frozen=True)
class Work:
    """Work of one rank: floating-point operations, and bytes that its memory reads and writes."""

    num_flops: int
    num_bytes: int

    def seconds(self, chip: Chip, dtype: str) -> float:
        """Time by the roofline: the longer of compute time and memory time."""
        assert chip.peak_flops is not None
        assert chip.memory_bandwidth is not None
        return max(self.num_flops / chip.peak_flops[dtype], self.num_bytes / chip.memory_bandwidth)

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple, num_ranks: int, more_bytes: int = 0) -> "Work":
        """Measures the work of a function of arrays of the given shapes."""
        jaxpr = jax.make_jaxpr(function, axis_env=[(EXPERT_AXIS, num_ranks)])(*arguments)
        return cls(dot_flops(jaxpr), dot_bytes(jaxpr) + more_bytes)


def works(spec: StepSpec, num_sequences: int) -> Mapping[str, Work]:
    """Work of each part of a step per run, by the names of ``swift.pipeline.scopes``.

    Args:
        spec: specification of the step, on any mesh.
        num_sequences: sequences of a micro-batch on one rank.
    """
    ops = _single_worker(spec, num_sequences) if spec.is_single_worker else _ops(spec, num_sequences)
    return {**ops, scopes.UPDATE: _update(spec)}


def _ops(spec: StepSpec, num_sequences: int) -> dict[str, Work]:
    parts, (weights, extras, x) = split_stage(spec, num_sequences)
    ranks, d_out = spec.live.num_ranks, (x, jax.ShapeDtypeStruct((), spec.accumulate_dtype))
    b, h, w = map(stash_bytes, (parts.b_shapes, parts.h_shapes, parts.w_shapes))
    rank_weights, data = _rank_weights(spec), _microbatch(spec, num_sequences)
    head, embedding = rank_weights["head"], rank_weights["embedding"]

    def loss(head: Any, y: jax.Array) -> jax.Array:
        return spec.gpt.head_loss({"head": head}, y, jnp.asarray(data.labels), jnp.asarray(data.valid))

    def end(head: Any, y: jax.Array) -> Any:
        return jax.value_and_grad(loss, argnums=(0, 1))(head, y)

    def embed(embedding: Any, dx: jax.Array) -> Any:
        look_up = lambda weights: spec.gpt.embed({"embedding": weights}, jnp.asarray(data.inputs))  # noqa: E731
        return jax.vjp(look_up, embedding)[1](dx)

    f, b_, w_ = scopes.FORWARD, scopes.BACKWARD_INPUT, scopes.BACKWARD_WEIGHT
    stashed = (weights, extras, parts.b_shapes, parts.h_shapes, d_out)
    return {
        f: Work.of(parts.forward, (weights, extras, x), ranks, b + h),
        b_: Work.of(parts.backward_input, stashed, ranks, w),
        w_: Work.of(
            parts.backward_weight, (weights, extras, parts.h_shapes, parts.w_shapes), ranks, _added(spec, weights)
        ),
        HEAD: Work.of(end, (head, x), ranks, _added(spec, head)),
        EMBEDDING: Work.of(embed, (embedding, x), ranks, _added(spec, embedding)),
    }


def _single_worker(spec: StepSpec, num_sequences: int) -> dict[str, Work]:
    weights = _rank_weights(spec)
    placement = jax.ShapeDtypeStruct(spec.row_shapes.placement.shape, jnp.int32)

    def objective(weights: Weights, placement_LNS: jax.Array, batch: Any) -> jax.Array:
        sums = forward(spec, weights, placement_LNS, batch)
        return sums.loss + sums.aux

    arguments = (weights, placement, _microbatch(spec, num_sequences))
    added = _added(spec, weights)
    return {scopes.MICROBATCH: Work.of(jax.grad(objective), arguments, spec.live.num_ranks, added)}


def _update(spec: StepSpec) -> Work:
    """Work of an update: sums over replicas, and traffic of master weights, moments, slots and gradients."""
    ranks, state = spec.live.num_ranks, spec.row_shapes
    num_flops = 0
    for name, leaf in state.slots.items():
        gradients = jax.ShapeDtypeStruct((leaf.shape[0], *leaf.shape[2:]), spec.accumulate_dtype)
        placement = spec.placements(jnp.zeros(state.placement.shape, jnp.int32))[name]
        num_flops += Work.of(spec.layouts[name].collect, (gradients, placement), ranks).num_flops
    held, slots = (_bytes(tree) // ranks for tree in ((state.master, state.moments), state.slots))
    return Work(num_flops, 2 * held + slots + _added(spec, _rank_weights(spec)) // 2)


def _rank_weights(spec: StepSpec) -> Weights:
    """Shapes of a rank's weights."""

    def unpack(slots: Mapping[str, jax.Array]) -> Weights:
        return spec.gpt.unpack({name: leaf[:, 0] for name, leaf in slots.items()})

    return jax.eval_shape(unpack, dict(spec.row_shapes.slots))


def _microbatch(spec: StepSpec, num_sequences: int) -> Any:
    shape = (num_sequences, spec.gpt.config.sequence_length)
    return Batch(*(jnp.zeros(shape, dtype) for dtype in (jnp.int32, jnp.int32, jnp.bool_)))  # type: ignore[arg-type]


def _added(spec: StepSpec, weights: Any) -> int:
    """Bytes of gradient sums, read and written once."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
    return 2 * size * jnp.dtype(spec.accumulate_dtype).itemsize


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
