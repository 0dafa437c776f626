"""Costs of a stage's F, B and W for the planner: known before anything runs, and the same on every machine."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from swift.mesh import EXPERT_AXIS
from swift.models import Weights
from swift.pipeline.runtime.stage import Extras, layers_of, stage_function
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.split_backward import Shapes, SplitStage, dot_flops, split
from swift.schedules import Costs, SlotBytes


def split_stage(spec: StepSpec, num_sequences: int) -> tuple[SplitStage, tuple[Weights, Extras, jax.ShapeDtypeStruct]]:
    """Splits a stage's layers outside any mesh.

    Args:
        spec: step spec, on any mesh.
        num_sequences: sequences of a micro-batch on one rank.

    Returns:
        The split, and the shapes that it was made for: weights, extras, x ``[B, T, D]``.
    """
    config = spec.gpt.config
    state = jax.eval_shape(spec.init, jax.random.key(0))

    def of_one_rank(slots: dict[str, jax.Array]) -> Weights:
        return spec.gpt.unpack({name: leaf[0, :, 0] for name, leaf in slots.items()})

    valid = jax.ShapeDtypeStruct((num_sequences, config.sequence_length), jnp.bool_)
    x = jax.ShapeDtypeStruct((*valid.shape, config.model_dim), spec.compute_dtype)
    placement = jax.ShapeDtypeStruct(state.placement.shape[1:], jnp.int32)
    extras: Any = Extras(placement, valid)  # type: ignore[arg-type]
    weights = layers_of(jax.eval_shape(of_one_rank, state.slots))
    axes = [(EXPERT_AXIS, spec.live.num_ranks)]
    return split(stage_function(spec), weights, extras, x, axis_env=axes), (weights, extras, x)


def stage_costs(spec: StepSpec, num_sequences: int) -> Costs:
    """The costs of a stage's layers: times in units of F, from FLOPs of matmuls; memory in units of F's stash.

    Embedding and head are not counted: all stages are planned alike.

    Args:
        spec: step spec, on any mesh.
        num_sequences: sequences of a micro-batch on one rank.
    """
    parts, (weights, extras, x) = split_stage(spec, num_sequences)
    axes = [(EXPERT_AXIS, spec.live.num_ranks)]

    def flops(op: Callable[..., Any], *arguments: Any) -> int:
        return dot_flops(jax.make_jaxpr(op, axis_env=axes)(*arguments))

    aux = jax.ShapeDtypeStruct((), spec.accumulate_dtype)
    t_f = flops(parts.forward, weights, extras, x)
    t_b = flops(parts.backward_input, weights, extras, parts.b_shapes, parts.h_shapes, (x, aux))
    t_w = flops(parts.backward_weight, weights, extras, parts.h_shapes, parts.w_shapes)
    b, h, w, message = (stash_bytes(shapes) for shapes in (parts.b_shapes, parts.h_shapes, parts.w_shapes, (x,)))
    return Costs(t_b=t_b / t_f, t_w=t_w / t_f, w_stash=(h + w) / (b + h), inbox=message / (b + h))


def stage_sizes(spec: StepSpec, num_sequences: int) -> SlotBytes:
    """Bytes of one buffer slot of each kind on a rank; arguments as for ``stage_costs``."""
    parts, (_, _, x) = split_stage(spec, num_sequences)
    shapes = (parts.b_shapes, parts.h_shapes, parts.w_shapes, (x,), (x,))
    return SlotBytes(*map(stash_bytes, shapes))


def stash_bytes(shapes: Shapes) -> int:
    """Bytes of one buffer slot that holds arrays of these shapes."""
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in shapes)
