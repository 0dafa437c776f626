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

from swift.mesh.chips import Chip
from swift.mesh.per_rank import EXPERT_AXIS
from swift.pipeline import scopes
from swift.pipeline.runtime.costs import counted_stage, embedding_and_head, rank_weights, split_stage, stash_bytes
from swift.pipeline.runtime.stage.block import block_shapes
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.split_backward.flops import dot_bytes, dot_flops
from swift.pipeline.split_backward.split import SplitStage

HEAD, EMBEDDING = "head", "embedding"
"""Additional work: of the last chunk's F for the loss, its gradient and the head's; of the first chunk's B for the
gradient of the embedding."""


@dataclass(frozen=True)
class Work:
    """Work of one rank: floating-point operations, and bytes that its memory reads and writes."""

    num_flops: int
    num_bytes: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_flops + other.num_flops, self.num_bytes + other.num_bytes)

    def __mul__(self, times: int) -> "Work":
        return Work(self.num_flops * times, self.num_bytes * times)

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

    Ops of chunks with unequal layers are there by chunk, such as ``F/0``; a chunk is a stage if all cuts are alike.

    Args:
        spec: specification of the step, on any mesh.
        num_sequences: sequences of a micro-batch on one rank.
    """
    ops = _ops(spec, num_sequences)
    if spec.is_single_worker:
        ops = {scopes.MICROBATCH: sum(ops.values(), Work(0, 0))}
    return {**ops, scopes.UPDATE: _update(spec)}


def _ops(spec: StepSpec, num_sequences: int) -> dict[str, Work]:
    stage, (layers, extras, x) = split_stage(spec, num_sequences)
    counted = counted_stage(spec, stage, num_sequences)
    ranks, d_out = spec.live.num_ranks, (x, jax.ShapeDtypeStruct((), spec.accumulate_dtype))
    names = scopes.FORWARD, scopes.BACKWARD_INPUT, scopes.BACKWARD_WEIGHT
    cut = spec.chunks.ops
    of_chunks = [names] if cut.is_uniform else [[f"{name}/{c}" for name in names] for c in range(len(cut.sizes))]
    total = {name: Work(0, 0) for of_chunk in of_chunks for name in of_chunk}
    for is_moe, one in stage.kinds.items():
        given = block_shapes(layers, extras, is_moe)
        b, h, w = map(stash_bytes, (one.b_shapes, one.h_shapes, one.w_shapes))
        real, known = (_of_block(block, given, x, d_out, ranks) for block in (one, counted.kinds[is_moe]))
        more = b + h, w, _added(spec, given[0])
        of_block = [Work(c.num_flops, r.num_bytes + m) for c, r, m in zip(known, real, more, strict=True)]
        for of_chunk, count in zip(of_chunks, cut.counts(is_moe), strict=False):
            for name, work in zip(of_chunk, of_block, strict=True):
                total[name] += work * count
    return total | _embedding_and_head(spec, num_sequences, x)


def _of_block(one: SplitStage, given: tuple[Any, Any], x: Any, d_out: Any, num_ranks: int) -> list[Work]:
    """Work of F, B and W of a block, without what they keep."""
    return [
        Work.of(one.forward, (*given, x), num_ranks),
        Work.of(one.backward_input, (*given, one.b_shapes, one.h_shapes, d_out), num_ranks),
        Work.of(one.backward_weight, (*given, one.h_shapes, one.w_shapes), num_ranks),
    ]


def _embedding_and_head(spec: StepSpec, num_sequences: int, x: jax.ShapeDtypeStruct) -> dict[str, Work]:
    def work(end: Callable[..., Any], weights: Any, *others: Any) -> Work:
        return Work.of(end, (weights, *others), spec.live.num_ranks, _added(spec, weights))

    embedding, head = embedding_and_head(spec, num_sequences, x)
    return {HEAD: work(*head), EMBEDDING: work(*embedding)}


def _update(spec: StepSpec) -> Work:
    """Work of an update: sums over replicas, and traffic of master weights, moments, slots and gradients."""
    ranks, state = spec.live.num_ranks, spec.worker_shapes
    num_flops = 0
    for name, leaf in state.slots.items():
        gradients = jax.ShapeDtypeStruct((leaf.shape[0], *leaf.shape[2:]), spec.accumulate_dtype)
        placement = spec.placements(jnp.zeros(state.placement.shape, jnp.int32))[name]
        num_flops += Work.of(spec.layouts[name].collect, (gradients, placement), ranks).num_flops
    held, slots = (_bytes(tree) // ranks for tree in ((state.master, state.moments), state.slots))
    return Work(num_flops, 2 * held + slots + _added(spec, rank_weights(spec)) // 2)


def _added(spec: StepSpec, weights: Any) -> int:
    """Bytes of gradient sums, read and written once."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
    return 2 * size * jnp.dtype(spec.accumulate_dtype).itemsize


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
