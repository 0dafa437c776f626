"""A stage as one rank sees it: the function that F, B and W are made of, and the sums over micro-batches.

Legend: B sequences of this rank, T positions, D model dim, L MoE layers of the stage, E classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from swift.experts import Load, expert_parallel_moe
from swift.mesh import EXPERT_AXIS
from swift.models import Weights
from swift.pipeline.runtime.step_spec import EMBEDDING_AND_HEAD, StepSpec

DeviceBatch: TypeAlias = Any
"""A ``Batch`` of ``jax.Array``."""

StageFunction = Callable[[Weights, "Extras", jax.Array], tuple[tuple[jax.Array, jax.Array], Load]]
"""The layers of a stage: (their weights, extras, x_BTD) -> ((y_BTD, auxiliary loss), load[L, E])."""


class Extras(NamedTuple):
    """Inputs of a stage without a gradient; B and W get them again, so they are never stashed."""

    placement_LNS: jax.Array
    valid_BT: jax.Array


class Sums(NamedTuple):
    """Sums over micro-batches: of this rank, and after ``over_ranks`` of all expert ranks."""

    loss: jax.Array  # cross-entropies of tokens, nats; at least float32
    aux: jax.Array  # auxiliary losses of micro-batches; at least float32
    tokens: jax.Array  # int32, tokens with a loss
    load: Load  # int32[L, E] each

    def over_ranks(self) -> "Sums":
        """The sums over all expert ranks."""
        return jax.tree.map(lambda leaf: lax.psum(leaf, EXPERT_AXIS), self)


def no_sums(spec: StepSpec) -> Sums:
    """Zero sums."""
    load = jnp.zeros((spec.num_moe_layers, spec.experts.num_classes), jnp.int32)
    zero = jnp.zeros((), spec.accumulate_dtype)
    return Sums(zero, zero, jnp.zeros((), jnp.int32), Load(load, load, load))


def layers_of(weights: Weights) -> Weights:
    """The weights of a stage's layers, without embedding and head."""
    return {name: rows for name, rows in weights.items() if name not in EMBEDDING_AND_HEAD}


def stage_function(
    spec: StepSpec,
) -> Callable[[Weights, Extras, jax.Array], tuple[tuple[jax.Array, jax.Array], Load]]:
    """The layers of a stage: (their weights, extras, x_BTD) -> ((y_BTD, auxiliary loss), load[L, E])."""
    gpt, experts = spec.gpt, spec.gpt.groups.get("expert")

    def stage(weights: Weights, extras: Extras, x_BTD: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Load]:
        def moe(row: int, logits_TE: jax.Array, x_TD: jax.Array, valid_T: jax.Array, state: Any) -> Any:
            assert experts is not None
            placement_NS = extras.placement_LNS[row]
            apply = experts.module(state)
            return expert_parallel_moe(spec.experts, logits_TE, x_TD, valid_T, placement_NS, apply)

        y_BTD, aux, loads = gpt.stage(weights, spec.pattern, x_BTD, extras.valid_BT, moe)
        load = jax.tree.map(lambda *rows: jnp.stack(rows), *loads) if loads else no_sums(spec).load
        return (y_BTD, aux), load

    return jax.checkpoint(stage) if spec.remat else stage


def forward(spec: StepSpec, weights: Weights, placement_LNS: Int[Array, "L N S"], batch: DeviceBatch) -> Sums:
    """Runs one micro-batch ``[B, T]`` of this rank through the whole model; for a single stage."""
    gpt = spec.gpt
    x = gpt.embed(weights, batch.inputs)
    (y, aux), load = stage_function(spec)(layers_of(weights), Extras(placement_LNS, batch.valid), x)
    loss = gpt.head_loss(weights, y, batch.labels, batch.valid)
    return Sums(loss, aux, batch.valid.sum(dtype=jnp.int32), load)
