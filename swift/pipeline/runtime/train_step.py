"""The step functions of a pipeline: one jitted program for each configuration, with the tick table as data.

``window_step`` runs K iterations as one program, in which every stage updates as soon as it and its peers are done and
starts the next iteration (ReCycle's staggered optimizer). The norm of the whole model's gradient is known only
afterwards: so a window is a transaction, which leaves the old state unchanged and reports whether it counts.
``barrier_step`` runs one iteration in which all stages wait for the norm before they update: it always counts.

Legend: K iterations of the window, n micro-batches of a worker, B sequences of this rank, T positions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Wrapped

from swift.mesh.per_rank import RANKED, REPLICATED, SHARED
from swift.pipeline import scopes
from swift.pipeline.runtime.metrics import Sums
from swift.pipeline.runtime.rank_context import RankContext, everywhere
from swift.pipeline.runtime.stage.stage_ops import EvaluationOps
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.runtime.tick_arrays import Columns, Common
from swift.pipeline.runtime.update import (
    apply_gradients,
    clip_scale,
)
from swift.pipeline.stage_weights import StageWeights
from swift.pipeline.train_state import DeviceBatch, TrainState
from swift.schedules.lowering.tick_table import TickTable

_IN = (REPLICATED, SHARED, RANKED)


def window_step(spec: StepSpec, table: TickTable, num_iterations: int, *, keep_gradients: bool = False) -> Wrapped:
    """The jitted window: (state, common, columns, batch ``[worker, n, rank, B, T]``) -> (state, metrics, ok).

    The old state is left unchanged. Metrics are ``[worker, K, ...]``, see ``metrics_of``; ``ok`` is bool[worker], the
    same on all workers: every gradient was finite and none had to be clipped. If not ``ok``, the new state is invalid.

    Args:
        spec: step spec, on the live mesh whose rows the table has columns for.
        table: tick table of K iterations; only its shape is used.
        num_iterations: K.
        keep_gradients: whether the result has a fourth member, the iterations' mean gradients of the master weights by
            group, ``[worker, K, rank, ...]``; for tests.
    """
    assert not spec.sums_need_all, "a sum over peers that needs all workers cannot be part of a staggered update"

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Any:
        rank = RankContext.enter(spec, table, num_iterations, state, common, columns, batch)

        def phase(loop: Any, now: Any) -> tuple[Any, None]:
            (state, copies, carry, outcome), ((first, end), iteration, chunk, ends_iteration) = loop, now
            chunk = chunk if rank.own_chunk is None else rank.own_chunk
            carry = rank.interpreter.run(rank.ops(state, copies), first, end, carry)

            def update(state: TrainState, copies: Any, totals: StageWeights, outcome: Any) -> Any:
                of_chunk, gradients, record = rank.reduce(
                    state, totals, carry.sums, iteration, chunk, spec.rounds.sum_of(chunk)
                )
                # The chunk's norm is at most the model's, so the scale is 1 in a window that counts. Without it XLA
                # would fuse and round the update differently from ``barrier_step``, and results would differ.
                scale = clip_scale(spec, jnp.sqrt(record.square_norm))
                of_chunk = apply_gradients(spec, of_chunk, gradients, record.load.popularity_E, rank.ends(chunk), scale)
                after = rank.layers.put_state(state, of_chunk, chunk, ends_iteration=ends_iteration)
                with jax.named_scope(scopes.UPDATE):
                    copies = rank.hot_rows.fetch(after.slots, iteration + 1, rank.ends(chunk).is_first, copies)
                return (
                    after,
                    copies,
                    rank.layers.cleared(totals, chunk),
                    rank.kept(outcome, record, gradients, chunk, iteration),
                )

            state, copies, totals, outcome = lax.cond(
                iteration >= 0, update, lambda *same: same, state, copies, carry.totals, outcome
            )
            return (state, copies, carry.with_totals(totals), outcome), None

        kept = rank.nothing_kept(state, num_iterations, keep_gradients=keep_gradients)
        start = state, rank.first_copies(state), rank.start, kept
        loop, _ = lax.scan(phase, start, (common.phases_H2, *columns.updates))
        after, _, carry, (record, *gradients_K) = loop
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
        spec: step spec, on the live mesh whose rows the table has columns for.
        table: tick table of one iteration; only its shape is used. Its updates are ignored: all stages update at the
            end.
        keep_state: whether to leave the old state unchanged.
    """

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Any:
        rank = RankContext.enter(spec, table, 1, state, common, columns, batch)
        carry = rank.interpreter.run(rank.ops(state, rank.first_copies(state)), 0, common.phases_H2[-1, 1], rank.start)
        kept, updates, tied = rank.nothing_kept(state, 1), [], rank.tied(state, carry.totals)
        for turn, (chunk, peer_sum) in enumerate(rank.chunks()):
            with rank.named_round(turn):
                of_chunk, gradients, record = rank.reduce(state, carry.totals, carry.sums, 0, chunk, peer_sum, tied)
            kept = rank.kept(kept, record, gradients, chunk, 0)
            updates.append((chunk, of_chunk, gradients, record))
        norm_K = rank.norm(kept[0].square_norm)
        scale = clip_scale(spec, norm_K[0])
        for turn, (chunk, of_chunk, gradients, record) in enumerate(updates):
            with rank.named_round(turn):
                after = apply_gradients(spec, of_chunk, gradients, record.load.popularity_E, rank.ends(chunk), scale)
            state = rank.layers.put_state(state, after, chunk, ends_iteration=turn == len(updates) - 1)
        return state, rank.metrics(carry.sums, norm_K, kept[0])

    return _jitted(spec, per_rank, (spec.specs, SHARED), donate_argnums=() if keep_state else 0)


def evaluation_step(spec: StepSpec, table: TickTable) -> Wrapped:
    """The jitted sums ``[worker]`` of one batch on unchanged weights; validation drops tokens as training does.

    Args:
        spec: step spec, on the live mesh whose rows the table has columns for.
        table: tick table with F alone, see ``TickTable.forward_only``.
    """

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Sums:
        rank = RankContext.enter(spec, table, 1, state, common, columns, batch, trains=False)
        weights = StageWeights.of(spec.gpt, spec.chunks, state.slots, rank.layers.holding)
        ops = EvaluationOps(spec, rank.stage, weights, state.placement, rank.own_chunk, batch)
        sums = rank.interpreter.evaluate(ops, common.phases_H2[-1, 1], rank.start)
        return jax.tree.map(lambda leaf: everywhere(spec, leaf[0]), sums)

    return _jitted(spec, per_rank, SHARED)


def _jitted(spec: StepSpec, per_rank: Callable[..., Any], out_specs: Any, **options: Any) -> Wrapped:
    in_specs = (spec.specs, *_IN)
    run = spec.live.per_rank(per_rank, in_specs, out_specs)
    # Explicit shardings, so that the states of init, of a restore and of a previous call run the same program.
    ins, outs = map(spec.shardings_of, (in_specs, out_specs))
    return jax.jit(run, in_shardings=ins, out_shardings=outs, **options)
