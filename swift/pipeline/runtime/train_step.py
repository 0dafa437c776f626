"""The step functions of a pipeline: one jitted program for each configuration, with the tick table as data.

``window_step`` runs K iterations as one program, in which every stage updates as soon as it and its peers are done and
starts the next iteration (ReCycle's staggered optimizer). The norm of the whole model's gradient is known only
afterwards: so a window is a transaction, which leaves the old state unchanged and reports whether it counts.
``barrier_step`` runs one iteration in which all stages wait for the norm before they update: it always counts.

Legend: K iterations of the window, n micro-batches of a worker, B sequences of this rank, T positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Wrapped

from swift.mesh import EXPERT_AXIS, RANKED, REPLICATED, SHARED, WORKER_AXIS
from swift.pipeline import scopes
from swift.pipeline.runtime.interpreter import Carry, Interpreter, empty_carry
from swift.pipeline.runtime.metrics import Sums, UpdateRecord, metrics_of, over_stages
from swift.pipeline.runtime.stage import Extras, Stage
from swift.pipeline.runtime.stage_ops import StageOps
from swift.pipeline.runtime.step_spec import DeviceBatch, StepSpec, TrainState
from swift.pipeline.runtime.tick_arrays import Columns, Common
from swift.pipeline.runtime.update import EmbeddingAndHead, apply_gradients, clip_scale, reduce_gradients, square_norm
from swift.pipeline.stage_weights import StageWeights
from swift.schedules import TickTable

_IN = (REPLICATED, SHARED, RANKED)


def window_step(spec: StepSpec, table: TickTable, num_iterations: int, *, keep_gradients: bool = False) -> Wrapped:
    """The jitted window: (state, common, columns, batch ``[worker, n, rank, B, T]``) -> (state, metrics, ok).

    The old state is left unchanged. Metrics are ``[worker, K, ...]``, see ``metrics_of``; ``ok`` is bool[worker], the
    same in all rows: every gradient was finite and none had to be clipped. If not ``ok``, the new state is invalid.

    Args:
        spec: step spec, on the live mesh that the table's rows are of.
        table: tick table of K iterations; only its shape is used.
        num_iterations: K.
        keep_gradients: whether the result has a fourth part, the iterations' mean gradients of the master weights by
            group, ``[worker, K, rank, ...]``; for tests.
    """
    assert not spec.peer_sum.in_rounds, "a sum over peers that needs all workers cannot be part of a staggered update"

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Any:
        rank = _Rank.enter(spec, table, num_iterations, state, common, columns, batch)

        def phase(loop: Any, now: Any) -> tuple[Any, None]:
            (state, carry, outcome), ((first, end), iteration) = loop, now
            carry = rank.interpreter.run(rank.ops(state), first, end, carry)

            def update(state: TrainState, totals: StageWeights, outcome: Any) -> Any:
                gradients, record = rank.reduce(state, totals, carry.sums, iteration)
                # The stage's norm is at most the model's, so the scale is 1 in a window that counts. Without it XLA
                # would fuse and round the update differently from ``barrier_step``, and results would differ.
                scale = clip_scale(spec, jnp.sqrt(record.square_norm))
                after = apply_gradients(spec, state, gradients, record.load.popularity_E, rank.ends, scale)
                kept = (record, gradients) if keep_gradients else (record,)
                outcome = jax.tree.map(lambda all_K, one: all_K.at[iteration].set(one), outcome, kept)
                return after, jax.tree.map(jnp.zeros_like, totals), outcome

            state, totals, outcome = lax.cond(iteration >= 0, update, lambda *same: same, state, carry.totals, outcome)
            return (state, carry.with_totals(totals), outcome), None

        one = jax.eval_shape(lambda: rank.reduce(state, rank.start.totals, rank.start.sums, 0))
        shapes = (one[1], one[0]) if keep_gradients else (one[1],)
        outcome = jax.tree.map(lambda leaf: jnp.zeros((num_iterations, *leaf.shape), leaf.dtype), shapes)
        loop, _ = lax.scan(phase, (state, rank.start, outcome), (common.phases_H2, columns.update_H))
        after, carry, (record, *gradients_K) = loop
        norm_K = rank.norm(record.square_norm)
        most = jnp.inf if spec.clip_norm is None else spec.clip_norm
        ok = jnp.all(jnp.isfinite(norm_K) & (norm_K <= most))
        return (after, rank.metrics(carry.sums, norm_K, record), ok, *gradients_K)

    out_specs = (spec.specs, SHARED, SHARED, *[RANKED] * keep_gradients)
    return _jitted(spec, per_rank, out_specs)


def barrier_step(spec: StepSpec, table: TickTable, *, keep_state: bool = False) -> Wrapped:
    """The jitted iteration with the exact clip: (state, common, columns, batch) -> (state, metrics).

    The old state's buffers are donated, unless ``keep_state``. Metrics are ``[worker, 1, ...]``. This step also runs
    where a sum over unequally many peers needs all workers (TPU).

    Args:
        spec: step spec, on the live mesh that the table's rows are of.
        table: tick table of one iteration; only its shape is used. Its updates are ignored: all stages update at the
            end.
        keep_state: whether to leave the old state unchanged.
    """

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Any:
        rank = _Rank.enter(spec, table, 1, state, common, columns, batch)
        carry = rank.interpreter.run(rank.ops(state), 0, common.phases_H2[-1, 1], rank.start)
        gradients, record = rank.reduce(state, carry.totals, carry.sums, 0)
        norm = rank.norm(record.square_norm)
        scale = clip_scale(spec, norm)
        after = apply_gradients(spec, state, gradients, record.load.popularity_E, rank.ends, scale)
        return after, rank.metrics(carry.sums, norm[None], jax.tree.map(lambda leaf: leaf[None], record))

    return _jitted(spec, per_rank, (spec.specs, SHARED), donate_argnums=() if keep_state else 0)


def evaluation_step(spec: StepSpec, table: TickTable) -> Wrapped:
    """The jitted sums ``[worker]`` of one batch on unchanged weights; validation drops tokens as training does.

    Args:
        spec: step spec, on the live mesh that the table's rows are of.
        table: tick table with F alone, see ``TickTable.forward_only``.
    """

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Sums:
        rank = _Rank.enter(spec, table, 1, state, common, columns, batch)
        sums = rank.interpreter.evaluate(rank.ops(state), common.phases_H2[-1, 1], rank.start)
        return jax.tree.map(lambda leaf: _everywhere(spec, leaf[0]), sums)

    return _jitted(spec, per_rank, SHARED)


def _jitted(spec: StepSpec, per_rank: Callable[..., Any], out_specs: Any, **options: Any) -> Wrapped:
    in_specs = (spec.specs, *_IN)
    run = spec.live.per_rank(per_rank, in_specs, out_specs)
    # Explicit shardings, so that the states of init, of a restore and of a previous call run the same program.
    ins, outs = map(spec.live.shardings, (in_specs, out_specs))
    return jax.jit(run, in_shardings=ins, out_shardings=outs, **options)


class _Rank(NamedTuple):
    """A rank's context before the first tick of a step function; lives as long as its trace."""

    spec: StepSpec
    stage: Stage
    interpreter: Interpreter
    start: Carry
    batch: DeviceBatch
    ends: EmbeddingAndHead
    tokens_K: jax.Array  # int32, of the iterations' global batches

    @classmethod
    def enter(
        cls,
        spec: StepSpec,
        table: TickTable,
        num_iterations: int,
        state: TrainState,
        common: Common,
        columns: Columns,
        batch: DeviceBatch,
    ) -> "_Rank":
        """Splits the stage, counts the tokens and empties the buffers."""
        message = jnp.zeros((*batch.inputs.shape[1:], spec.gpt.config.model_dim), spec.compute_dtype)
        index = jnp.asarray(spec.live.stage_R)[spec.live.row_index()]
        weights = StageWeights.of(spec.gpt, spec.cut, state.slots, index)
        stage = Stage.of(spec, weights.layers, Extras(state.placement, batch.valid[0]), message, index)
        permutations = table.activations.permutations, table.gradients.permutations
        ends = EmbeddingAndHead(index == 0, index == spec.num_stages - 1)
        tokens_n = batch.valid.sum(axis=(1, 2), dtype=jnp.int32) * ends.is_first
        is_of_Kn = jnp.arange(num_iterations, dtype=jnp.int32)[:, None] == columns.data_iteration_n[None]
        return cls(
            spec,
            stage,
            Interpreter(permutations, common, columns, message),
            empty_carry(spec, table, stage, weights, message, num_iterations),
            batch,
            ends,
            _everywhere(spec, jnp.sum(is_of_Kn * tokens_n[None], axis=1, dtype=jnp.int32)),
        )

    @property
    def divisor_K(self) -> jax.Array:
        """Divisors of the iterations' sums: the tokens of their global batches."""
        return jnp.maximum(self.tokens_K, 1).astype(self.spec.accumulate_dtype)

    def ops(self, state: TrainState) -> StageOps:
        """The stage's ops with the weights of a state, which hold until the next update."""
        spec = self.spec
        weights = StageWeights.of(spec.gpt, spec.cut, state.slots, self.stage.index)
        aux_weight_K = spec.experts.aux_loss_coefficient * self.divisor_K / spec.num_microbatches
        return StageOps(spec, self.stage, weights, state.placement, self.ends, self.batch, aux_weight_K)

    def reduce(
        self, state: TrainState, totals: StageWeights, sums_K: Sums, iteration: Any
    ) -> tuple[dict[str, jax.Array], UpdateRecord]:
        """The first half of U: gradients of the master weights, and the record of the iteration."""
        gradients = reduce_gradients(
            self.spec,
            state,
            totals.packed(self.spec.gpt, self.spec.cut, self.stage.index),
            self.divisor_K[iteration],
            self.ends,
        )
        load = jax.tree.map(lambda load_K: load_K[iteration], sums_K.load)
        with jax.named_scope(scopes.UPDATE):
            load = self.spec.peer_sum(jax.tree.map(lambda counts: lax.psum(counts, EXPERT_AXIS), load))
        square = square_norm(self.spec, gradients, state.placement)
        return gradients, UpdateRecord.of(self.spec, state, square, load)

    def norm(self, square: jax.Array) -> jax.Array:
        """The norm of the whole model's gradients, from the squared norms of the stages'."""
        live = self.spec.live
        speaks = np.zeros(live.num_live, bool)
        speaks[list(live.first_rows)] = True
        # Every stage once; all ranks of a worker know the same.
        mine = jnp.where(jnp.asarray(speaks)[live.row_index()], square, jnp.zeros_like(square))
        return jnp.sqrt(_everywhere(self.spec, mine) / live.num_ranks)

    def metrics(self, sums_K: Sums, norm_K: jax.Array, record: UpdateRecord) -> dict[str, jax.Array]:
        """The metrics of the window; ``record`` has a leading dim K."""
        loss_K, aux_K = (_everywhere(self.spec, part) for part in (sums_K.loss, sums_K.aux))
        record = over_stages(self.spec, record)
        return metrics_of(loss_K, aux_K / self.spec.num_microbatches, self.tokens_K, norm_K, record)


def _everywhere(spec: StepSpec, value: jax.Array) -> jax.Array:
    """The sum over all ranks of all workers."""
    axes = (EXPERT_AXIS,) if spec.live.num_live == 1 else (WORKER_AXIS, EXPERT_AXIS)
    return lax.psum(value, axes)
