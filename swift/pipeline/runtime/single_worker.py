"""The iteration of a single worker: without a pipeline, the backward pass is not split.

Micro-batches run one after another, forward and backward, and their slot gradients are added up. Then comes the same
update U as in a pipeline.

Legend: M micro-batches, B sequences of this rank, T positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Wrapped

from swift.data import Batch
from swift.mesh import EXPERT_AXIS, RANKED, SHARED, LiveMesh
from swift.models import Weights
from swift.pipeline import scopes
from swift.pipeline.runtime.batch_layout import share_sequences
from swift.pipeline.runtime.metrics import UpdateRecord, metrics_of
from swift.pipeline.runtime.stage import DeviceBatch, Sums, forward, no_sums
from swift.pipeline.runtime.stage_ops import add
from swift.pipeline.runtime.step_spec import StepSpec, TrainState
from swift.pipeline.runtime.update import EmbeddingAndHead, apply_gradients, clip_scale, reduce_gradients, square_norm

_BOTH = EmbeddingAndHead(is_first=True, is_last=True)


def put_batch(batch: Batch, live: LiveMesh) -> DeviceBatch:
    """Puts a host batch ``[M, B, T]`` on one worker's devices: ``[1, M, N, B / N, T]``, see ``share_sequences``."""
    return live.put(Batch(*(share_sequences(leaf[None], live.num_ranks) for leaf in batch)), RANKED)


def single_worker_gradients(spec: StepSpec, state: TrainState, batch: DeviceBatch) -> tuple[dict[str, jax.Array], Sums]:
    """Gradients of loss and auxiliary loss over all micro-batches, in each group's master layout.

    The objective is the mean cross-entropy of the global batch's tokens plus the auxiliary loss's mean over
    micro-batches. Local sums are differentiated and reduced explicitly; the division comes last and once.

    Args:
        spec: step spec, of one worker.
        state: this rank's state.
        batch: this rank's sequences of every micro-batch, ``[M, B, T]``.

    Returns:
        (gradients by group, sums over ranks and micro-batches).
    """
    weights = spec.gpt.unpack(state.slots)
    tokens = lax.psum(batch.valid.sum(dtype=jnp.int32), EXPERT_AXIS)
    divisor = jnp.maximum(tokens, 1).astype(spec.accumulate_dtype)
    aux_weight = spec.experts.aux_loss_coefficient * divisor / spec.num_microbatches

    def objective(weights: Weights, microbatch: DeviceBatch) -> tuple[jax.Array, Sums]:
        sums = forward(spec, weights, state.placement, microbatch)
        return sums.loss + aux_weight * sums.aux, sums

    def accumulate(total: Any, microbatch: DeviceBatch) -> tuple[Any, None]:
        with jax.named_scope(scopes.MICROBATCH):
            gradients, sums = jax.grad(objective, has_aux=True)(weights, microbatch)
        return (add(total[0], gradients), jax.tree.map(jnp.add, total[1], sums)), None

    none = jax.tree.map(lambda w: jnp.zeros(w.shape, spec.accumulate_dtype), weights)
    (gradients, sums), _ = lax.scan(accumulate, (none, no_sums(spec)), batch)
    return reduce_gradients(spec, state, gradients, divisor, _BOTH), sums.over_ranks()


def single_worker_step(spec: StepSpec, *, keep_state: bool = False) -> Wrapped:
    """The jitted iteration: (state, batch ``[worker, M, rank, B, T]``) -> (state, metrics ``[worker, 1, ...]``).

    The old state's buffers are donated, unless ``keep_state``. For the metrics see ``metrics_of``.
    """

    def per_rank(state: TrainState, batch: DeviceBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        gradients, sums = single_worker_gradients(spec, state, batch)
        square = square_norm(spec, gradients, state.placement)
        norm = jnp.sqrt(square)
        scale = clip_scale(spec, norm)
        after = apply_gradients(spec, state, gradients, sums.load.popularity_E, _BOTH, scale)
        record = UpdateRecord.of(spec, state, square, sums.load)
        of_window = jax.tree.map(
            lambda leaf: leaf[None], (sums.loss, sums.aux / spec.num_microbatches, sums.tokens, norm, record)
        )
        return after, metrics_of(*of_window)

    run = spec.live.per_rank(per_rank, (spec.specs, RANKED), (spec.specs, SHARED))
    # Explicit shardings, so that the states of init, of a restore and of a previous call run the same program.
    state, batch, metrics = map(spec.live.shardings, (spec.specs, RANKED, SHARED))
    return jax.jit(
        run, in_shardings=(state, batch), out_shardings=(state, metrics), donate_argnums=() if keep_state else 0
    )


def single_worker_evaluation(spec: StepSpec) -> Wrapped:
    """The jitted sums ``[worker]`` of one batch on unchanged weights; validation drops tokens as training does."""

    def per_rank(state: TrainState, batch: DeviceBatch) -> Sums:
        weights = spec.gpt.unpack(state.slots)
        sums = lax.map(lambda microbatch: forward(spec, weights, state.placement, microbatch), batch)
        return jax.tree.map(lambda leaf: leaf.sum(axis=0, dtype=leaf.dtype), sums).over_ranks()

    return jax.jit(spec.live.per_rank(per_rank, (spec.specs, RANKED), SHARED))
