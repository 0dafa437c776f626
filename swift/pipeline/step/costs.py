"""Costs of a stage's F, B and W for the planner, computed before anything runs and equal on every machine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swift.data.windows import Batch
from swift.mesh.per_rank import EXPERT_AXIS
from swift.models.gpt import StackedWeights, Weights
from swift.pipeline.split_backward.equations import dot_flops
from swift.pipeline.split_backward.split import SplitStage
from swift.pipeline.state import EMBEDDING_AND_HEAD, Layers, StageWeights, layer_of
from swift.pipeline.step.spec import StepSpec
from swift.pipeline.step.stage import Extras, Stage, block_shapes
from swift.schedules.lowering.lower import SlotBytes
from swift.schedules.problem import Chunk, Costs


def split_stage(spec: StepSpec, num_sequences: int) -> tuple[Stage, tuple[Layers, Extras, jax.ShapeDtypeStruct]]:
    """Splits a stage's blocks outside any mesh.

    Args:
        spec: step spec, on any mesh.
        num_sequences: sequences of a micro-batch on one rank.

    Returns:
        (the stage, (layers, extras, x ``[B, T, D]``) as the shapes that it was built for).
    """
    config = spec.gpt.config
    state = spec.abstract(with_slots=True)

    def rank_layers(slots: dict[str, jax.Array]) -> Layers:
        return StageWeights.of(spec.gpt, spec.chunks, {name: leaf[0, :, 0] for name, leaf in slots.items()}, 0).layers

    shape = num_sequences, config.sequence_length
    x = jax.ShapeDtypeStruct((*shape, config.model_dim), spec.compute_dtype)
    data: Any = Batch(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.int32, jnp.bool_)))  # type: ignore[arg-type]
    if spec.draws_noise:
        data = data._replace(keys=jax.ShapeDtypeStruct((num_sequences, 2), jnp.uint32))
    placement = jax.ShapeDtypeStruct(state.placement.shape[1:], jnp.int32)
    extras: Any = jax.eval_shape(partial(Extras.of, spec, holding=0), placement, data)
    layers = jax.eval_shape(rank_layers, state.slots)
    axes = [(EXPERT_AXIS, spec.live.num_ranks)]
    return Stage.of(spec, layers, extras, x, 0, axis_env=axes), (layers, extras, x)


def counted_stage(spec: StepSpec, stage: Stage, num_sequences: int) -> Stage:
    """Returns the stage, with blockwise attention instead of a kernel, since a kernel's FLOPs cannot be counted."""
    if spec.gpt.kernel in ("plain", "blockwise"):
        return stage
    return split_stage(replace(spec, gpt=replace(spec.gpt, kernel="blockwise")), num_sequences)[0]


def stage_costs(spec: StepSpec, num_sequences: int) -> Costs:
    """Computes layer costs for a stage: times relative to F, from matmul FLOPs; memory relative to F's stash.

    The costs are those of a chunk with the largest number of blocks of each kind, without embedding and head.
    ``plan_costs`` includes both and covers other chunks.

    Args:
        spec: step spec, on any mesh.
        num_sequences: sequences of a micro-batch on one rank.
    """
    return plan_costs(spec, num_sequences)[0]


def plan_costs(spec: StepSpec, num_sequences: int) -> tuple[Costs, tuple[Chunk, ...], SlotBytes]:
    """Computes ``stage_costs``, each chunk's costs as factors of them, and the bytes per buffer slot on a rank.

    F of the last chunk includes the loss and the head's whole backward pass; B of the first chunk includes the gradient
    of the embedding. Stash slots have the same size for all chunks. With a single chunk, which all workers hold, there
    are no factors.
    """
    stage, (layers, extras, x) = split_stage(spec, num_sequences)
    counted = counted_stage(spec, stage, num_sequences)
    flops_K3 = np.array(
        [_block_flops(spec, split, block_shapes(layers, extras, k), x) for k, split in counted.kinds.items()]
    )
    most_3, cut = np.array([stage.stack_size(is_moe) for is_moe in stage.kinds]) @ flops_K3, spec.chunks.ops
    times_C3 = np.array([cut.counts(is_moe) for is_moe in stage.kinds]).T @ flops_K3
    t_f, t_b, t_w = most_3.tolist()
    b, h, w, message = map(stash_bytes, (*stage.stash_shapes, x))
    costs = Costs(t_b=t_b / t_f, t_w=t_w / t_f, w_stash=(h + w) / (b + h), inbox=message / (b + h))
    sizes = SlotBytes(b, h, w, message, message)
    if len(cut.sizes) == 1:
        return costs, (), sizes
    embedding_flops, head_flops = (_flops_of(spec, *end) for end in embedding_and_head(spec, num_sequences, x))
    times_C3[-1, 0] += head_flops
    times_C3[0, 1] += embedding_flops
    factors = zip(cut.sizes, (times_C3 / most_3).tolist(), strict=True)
    return costs, tuple(Chunk(size, *chunk_factors) for size, chunk_factors in factors), sizes


def embedding_and_head(spec: StepSpec, num_sequences: int, x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the work outside the blocks in the first chunk's B and the last chunk's F: (function, *shapes) each.

    The first is the gradient of the embedding; the second is the loss with its gradients with respect to the head and
    its input.

    Args:
        spec: step spec, on any mesh.
        num_sequences: sequences of a micro-batch on one rank.
        x: shape and dtype of a block's input, ``[B, T, D]``.
    """
    shape = num_sequences, spec.gpt.config.sequence_length
    weights: Weights = jax.eval_shape(
        lambda stacks: {name: [layer_of(stacks[name], 0)] for name in EMBEDDING_AND_HEAD}, rank_weights(spec)
    )
    tokens, valid = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)

    read = {name: weights[name] for name in spec.gpt.head_groups}

    def embed(embedding: Any, inputs: jax.Array, dx: jax.Array) -> Any:
        return spec.gpt.embedding_gradient({"embedding": [embedding]}, inputs, None, dx, spec.row_wire_dtype)

    def loss(head: Any, y: jax.Array, labels: jax.Array, valid: jax.Array) -> jax.Array:
        return spec.gpt.head_loss(head, y, labels, valid)

    return (
        (embed, weights["embedding"][0], tokens, x),
        (jax.value_and_grad(loss, argnums=(0, 1)), read, x, tokens, valid),
    )


def rank_weights(spec: StepSpec) -> StackedWeights:
    """Returns the shapes of a rank's weights."""

    def unpack(slots: Mapping[str, jax.Array]) -> StackedWeights:
        return spec.gpt.unpack_stacks({name: leaf[:, 0] for name, leaf in slots.items()})

    return jax.eval_shape(unpack, dict(spec.worker_shapes.slots))


def _flops_of(spec: StepSpec, op: Callable[..., Any], *arguments: Any) -> int:
    """Counts the FLOPs of a per-rank function's matmuls."""
    return dot_flops(jax.make_jaxpr(op, axis_env=[(EXPERT_AXIS, spec.live.num_ranks)])(*arguments))


def _block_flops(
    spec: StepSpec, split: SplitStage, weights_and_extras: tuple[Any, Extras], x: Any
) -> tuple[int, int, int]:
    """Counts the matmul FLOPs in a block's F, B and W."""
    aux = jax.ShapeDtypeStruct((), spec.accumulate_dtype)
    return (
        _flops_of(spec, split.forward, *weights_and_extras, x),
        _flops_of(spec, split.backward_input, *weights_and_extras, *split.stash_shapes[:2], (x, aux)),
        _flops_of(spec, split.backward_weight, *weights_and_extras, *split.stash_shapes[1:]),
    )


def stash_bytes(shapes: Any) -> int:
    """Counts the bytes in one buffer slot that holds a tree of arrays with these shapes."""
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(shapes))
