"""The iteration of a single worker: without a pipeline, the backward pass is not split.

Micro-batches run one after another, forward and backward, and their slot gradients are summed: the ops are those of a
stage that is both first and last, with one slot in every buffer. The update U that follows is the same as in a
pipeline. Here and in a pipeline, the sequences of a micro-batch are divided among the expert ranks as evenly as
possible.

Legend: M micro-batches, B sequences of a micro-batch (on a device: sequences of its rank), N expert ranks,
T positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Wrapped
from jaxtyping import Shaped

from swift.data.windows import Batch
from swift.mesh.live import LiveMesh
from swift.mesh.per_rank import EXPERT_AXIS, RANKED, SHARED
from swift.pipeline import scopes
from swift.pipeline.split_backward.partition import Stashes
from swift.pipeline.state import DeviceBatch, StageWeights, TrainState
from swift.pipeline.step.metrics import Sums, UpdateRecord, loss_divisor, metrics_of
from swift.pipeline.step.spec import StepSpec
from swift.pipeline.step.stage import Extras, ForwardStage, Stage
from swift.pipeline.step.stage_ops import EvaluationOps, HotRows, StageOps
from swift.pipeline.step.tick_arrays import TickOp
from swift.pipeline.step.update import EmbeddingAndHead, apply_gradients, clip_scale, reduce_gradients, square_norm

_BOTH = EmbeddingAndHead(is_first=True, is_last=True)


def sequences_per_rank(num_sequences: int, num_ranks: int) -> int:
    """Returns how many sequences of a micro-batch every rank allocates room for.

    >>> sequences_per_rank(16, 8), sequences_per_rank(16, 7)
    (2, 3)
    """
    return -(-num_sequences // num_ranks)


def share_sequences(leaf: Shaped[np.ndarray, "*lead B T"], num_ranks: int) -> Shaped[np.ndarray, "*lead N b T"]:
    """Divides ``[..., B, T]`` into the ranks' shares ``[..., N, ceil(B / N), T]``: whole sequences, in order.

    If a rank has one sequence less than another, zeros fill its last place; in ``valid`` they mark invalid tokens.

    >>> share_sequences(np.array([[1], [2], [3]]), num_ranks=2).tolist()
    [[[1], [2]], [[3], [0]]]
    """
    *lead, num_sequences, length = leaf.shape
    room = sequences_per_rank(num_sequences, num_ranks)
    if num_sequences == num_ranks * room:
        return leaf.reshape(*lead, num_ranks, room, length)
    shares = np.zeros((*lead, num_ranks, room, length), leaf.dtype)
    for rank, sequence_indices in enumerate(np.array_split(np.arange(num_sequences), num_ranks)):
        shares[..., rank, : len(sequence_indices), :] = leaf[..., sequence_indices, :]
    return shares


def single_worker_batch(batch: Batch, num_ranks: int) -> Batch:
    """Converts a host batch ``[M, B, T]`` to ``[1, M, N, ceil(B / N), T]`` for one worker, see ``share_sequences``."""
    return batch.map(lambda leaf: share_sequences(leaf[None], num_ranks))


def put_batch(batch: Batch, live: LiveMesh) -> DeviceBatch:
    """Puts a host batch ``[M, B, T]`` on the devices of a single worker, see ``single_worker_batch``."""
    return live.put(single_worker_batch(batch, live.num_ranks), RANKED)


def single_worker_gradients(spec: StepSpec, state: TrainState, batch: DeviceBatch) -> tuple[dict[str, jax.Array], Sums]:
    """Computes the gradients of loss and auxiliary loss over all micro-batches, in each group's master layout.

    The objective is the mean cross-entropy over the global batch's tokens, weighted by ``Batch.weights``, plus the mean
    auxiliary loss over micro-batches. Local sums are differentiated and reduced explicitly, and divided once, at the
    end.

    Args:
        spec: step spec with a single worker.
        state: this rank's state.
        batch: this rank's sequences of every micro-batch, ``[M, B, T]``.

    Returns:
        (gradients by group, sums over ranks and micro-batches).
    """
    tokens = lax.psum(batch.valid.sum(dtype=jnp.int32), EXPERT_AXIS)
    weight = None
    if batch.weights is not None:
        weight = lax.psum(batch.weights.sum(dtype=spec.accumulate_dtype), EXPERT_AXIS)
    divisor = loss_divisor(tokens, weight, spec.accumulate_dtype)
    hot_rows = HotRows.choose(spec, batch.inputs, jnp.zeros(len(batch.inputs), jnp.int32), 1)
    copies = hot_rows.fetch(state.slots, 0, _BOTH.is_first, hot_rows.no_copies)
    weights = StageWeights.of(spec.gpt, spec.chunks, state.slots, 0, copies)
    extras = Extras.of(spec, state.placement, jax.tree.map(lambda leaf: leaf[0], batch), 0)
    stage = Stage.of(spec, weights.layers, extras, _message(spec, batch), holding=0)
    aux_weight = spec.experts.auxiliary_weight * divisor / spec.num_microbatches
    ops = StageOps(spec, stage, weights, state.placement, 0, batch, aux_weight[None], hot_rows)
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, spec.accumulate_dtype), ops.weights)
    message, empty = _message(spec, batch), _empty(stage)

    def accumulate(total: Any, index: jax.Array) -> tuple[Any, None]:
        totals, sums, stashes = total
        op = _op(index)
        with jax.named_scope(scopes.MICROBATCH):
            _, (gradients, stashes, sums, head) = ops.forward(
                op, message[None], message[None], stashes, sums, totals.head
            )
            layers, embedding = ops.backward(op, gradients, stashes, totals.layers, totals.embedding)
        return (StageWeights(layers, embedding, head), sums, stashes), None

    start = zeros, Sums.zeros(spec, 1), empty
    (totals, sums, *_), _ = lax.scan(accumulate, start, jnp.arange(len(batch.inputs), dtype=jnp.int32))
    sums = jax.tree.map(lambda leaf: leaf[0], sums).over_ranks()
    packed = hot_rows.collect(totals, 0, _BOTH.is_first).packed(spec.gpt, spec.chunks, 0)
    return reduce_gradients(spec, state, packed, divisor, _BOTH, spec.rounds.sums[0]), sums


def _message(spec: StepSpec, batch: DeviceBatch) -> jax.Array:
    """Returns zeros with the shape of a stage's input and output."""
    return jnp.zeros((*batch.inputs.shape[1:], spec.gpt.config.model_dim), spec.compute_dtype)


def _empty(stage: Stage) -> Stashes:
    """Returns stashes with one slot; none from B to W, since these run together."""
    shapes = stage.stash_shapes._replace(for_w=())
    return jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), shapes)


def _op(index: jax.Array) -> TickOp:
    """Returns the op for a micro-batch, which uses slot 0 of every buffer."""
    zero, no_messages = jnp.zeros_like(index), jnp.zeros(0, index.dtype)
    scalars = dict.fromkeys(TickOp._fields, zero) | {"data": index}
    return TickOp(**scalars | dict.fromkeys(("activation_slot_Q", "gradient_slot_Q"), no_messages))


def single_worker_step(spec: StepSpec, *, keep_state: bool = False) -> Wrapped:
    """Returns the jitted step: (state, batch ``[worker, M, rank, B, T]``) -> (state, metrics ``[worker, 1, ...]``).

    The old state's buffers are donated, unless ``keep_state``. For the metrics, see ``metrics_of``.
    """

    def per_rank(state: TrainState, batch: DeviceBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        gradients, sums = single_worker_gradients(spec, state, batch)
        square = square_norm(spec, gradients, state.placement)
        norm = jnp.sqrt(square)
        scale = clip_scale(spec, norm)
        after = apply_gradients(spec, state, gradients, sums.load.popularity_E, _BOTH, scale)
        record = UpdateRecord.of(spec, state, square, sums.without_numbers.load)
        aux = sums.aux / spec.num_microbatches
        outcome = sums.loss, aux, sums.tokens, sums.weight, norm, record, sums.load.numbers
        return after, metrics_of(*jax.tree.map(lambda leaf: leaf[None], outcome))

    donated = () if keep_state else 0
    return spec.jitted(per_rank, (spec.specs, RANKED), (spec.specs, SHARED), donate_argnums=donated)


def single_worker_evaluation(spec: StepSpec) -> Wrapped:
    """Returns the jitted evaluation: (state, batch) -> sums ``[worker]``; validation drops tokens as training does."""

    def per_rank(state: TrainState, batch: DeviceBatch) -> Sums:
        weights, message = StageWeights.of(spec.gpt, spec.chunks, state.slots, 0), _message(spec, batch)
        ops = EvaluationOps(spec, ForwardStage(spec, 0), weights, state.placement, 0, batch)

        def accumulate(sums: Sums, index: jax.Array) -> tuple[Sums, None]:
            return ops.evaluate(_op(index), message[None], sums)[1], None

        indices = jnp.arange(len(batch.inputs), dtype=jnp.int32)
        sums, _ = lax.scan(accumulate, Sums.zeros(spec, 1), indices)
        return jax.tree.map(lambda leaf: leaf[0], sums.without_numbers).over_ranks()

    return jax.jit(spec.live.per_rank(per_rank, (spec.specs, RANKED), SHARED))
