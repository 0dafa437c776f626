"""The step functions of a pipeline: one jitted program for each configuration, with the tick table as data.

``window_step`` runs K iterations as one program, in which every stage updates as soon as it and its peers are done, and
then starts the next iteration (ReCycle's staggered optimizer). The norm of the whole model's gradient is known only at
the end. So a window is a transaction: it leaves the old state unchanged and reports whether it counts. In contrast,
``barrier_step`` runs one iteration in which all stages wait for the norm before they update; it always counts.

Both use a rank's context: its stage, its interpreter, and the sums that its updates need. A worker that holds several
chunks updates them one at a time, since its peers differ from chunk to chunk. ``ChunkLayers`` takes a chunk's
state out of the worker's stacks; this state is the same on all workers that hold the chunk, whatever its position in
their stacks. If a worker has only one chunk, the chunk's state is the worker's.

Legend: K iterations of the window, n micro-batches of a worker (in an index: layers of a chunk), B sequences of this
rank, T positions, C chunks, H holdings, R mesh rows.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Wrapped

from swift.mesh.peer_sum import PeerAllReduce
from swift.mesh.per_rank import EXPERT_AXIS, RANKED, REPLICATED, SHARED, WORKER_AXIS
from swift.pipeline import scopes
from swift.pipeline.state import EMBEDDING_AND_HEAD, KINDS, DeviceBatch, Index, StageWeights, TrainState
from swift.pipeline.step.interpreter import Carry, Interpreter, empty_carry
from swift.pipeline.step.metrics import (
    Sums,
    UpdateRecord,
    in_model_order,
    loss_divisor,
    metrics_of,
    over_stages,
    sum_together,
)
from swift.pipeline.step.spec import StepSpec, SumInRound
from swift.pipeline.step.stage import Extras, ForwardStage, Stage
from swift.pipeline.step.stage_ops import EvaluationOps, HotRows, StageOps
from swift.pipeline.step.tick_arrays import Columns, Common
from swift.pipeline.step.update import (
    EmbeddingAndHead,
    apply_gradients,
    clip_scale,
    reduce_gradients,
    reduce_tied,
    square_norm,
)
from swift.schedules.lowering.tick_table import TickTable

_Tree = TypeVar("_Tree")

_IN = (REPLICATED, SHARED, RANKED)


@dataclass(frozen=True)
class ChunkLayers:
    """Takes a chunk's layers out of a worker's stacks, and puts them back; a no-op if workers have one chunk each.

    Attributes:
        spec: step spec.
        holding: number of the worker's holding, int32[].
    """

    spec: StepSpec
    holding: Index

    def totals(self, totals: StageWeights, chunk: Index) -> StageWeights:
        """Returns the gradients of a chunk's weights; zeros in padding layers."""
        if self.spec.chunks.is_one_chunk_per_worker:
            return totals
        return totals._replace(
            layers={is_moe: _taken(stack, self._index(is_moe, chunk)) for is_moe, stack in totals.layers.items()}
        )

    def cleared(self, totals: StageWeights, chunk: Index) -> StageWeights:
        """Returns the gradients of all weights, with a chunk's gradients set to zero."""
        if self.spec.chunks.is_one_chunk_per_worker:
            return jax.tree.map(jnp.zeros_like, totals)

        def layers_cleared(is_moe: bool, stack: Any) -> Any:
            index = self._index(is_moe, chunk)
            return jax.tree.map(lambda leaf: leaf.at[index].set(0, mode="drop"), stack)

        ends = EmbeddingAndHead.of(self.spec, chunk)
        return StageWeights(
            {is_moe: layers_cleared(is_moe, stack) for is_moe, stack in totals.layers.items()},
            _selected(ends.is_first, jax.tree.map(jnp.zeros_like, totals.embedding), totals.embedding),
            _selected(ends.is_last, jax.tree.map(jnp.zeros_like, totals.head), totals.head),
        )

    def of_stack(self, stack: _Tree, chunk: Index) -> _Tree:
        """Returns a chunk's layers of arrays ``[MoE layer, ...]``; zeros in padding layers."""
        return stack if self.spec.chunks.is_one_chunk_per_worker else _taken(stack, self._index(True, chunk))

    def state(self, state: TrainState, chunk: Index) -> TrainState:
        """Returns the state of a chunk; counters, the policy's state, embedding and head are the worker's."""
        if self.spec.chunks.is_one_chunk_per_worker:
            return state

        def chunk_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            name = group_of(path)
            if name is None or name in EMBEDDING_AND_HEAD:
                return leaf
            return _taken(leaf, self._index(KINDS[name], chunk), padding=None)

        master, moments, slots = jax.tree_util.tree_map_with_path(
            chunk_leaf, (state.master, state.moments, state.slots)
        )
        placement = _taken(state.placement, self._index(True, chunk), padding=None)
        return replace(state, master=master, moments=moments, slots=slots, placement=placement)

    def put_state(self, state: TrainState, chunk_state: TrainState, chunk: Index, *, ends_iteration: Any) -> TrainState:
        """Returns the worker's state with the state of a chunk put back.

        Args:
            state: state of the worker.
            chunk_state: state of the chunk.
            chunk: the chunk; with ``NONE`` only counters change.
            ends_iteration: whether this is the iteration's last update, after which the worker takes over counters and
                the policy's state from the chunk.
        """
        if self.spec.chunks.is_one_chunk_per_worker:
            return chunk_state
        ends = EmbeddingAndHead.of(self.spec, chunk)
        embeds = ends_iteration if self.spec.ties_stages else ends.is_first
        is_used = {"embedding": embeds, "head": ends.is_last, None: ends_iteration}

        def joined(path: tuple[Any, ...], old: jax.Array, new: jax.Array) -> jax.Array:
            name = group_of(path)
            if name is None or name in is_used:
                return jnp.where(is_used[name], new, old)
            return old.at[self._index(KINDS[name], chunk)].set(new, mode="drop")

        def arrays(of: TrainState) -> tuple[Any, ...]:
            return of.step, of.master, of.moments, of.slots

        step, master, moments, slots = jax.tree_util.tree_map_with_path(joined, arrays(state), arrays(chunk_state))
        policy = _selected(ends_iteration, chunk_state.policy, state.policy)
        placement = state.placement.at[self._index(True, chunk)].set(chunk_state.placement, mode="drop")
        return TrainState(step, master, moments, slots, placement, policy)

    def put_record(self, records_K: UpdateRecord, record: UpdateRecord, chunk: Index, iteration: Index) -> UpdateRecord:
        """Adds a chunk's record to a window's records; its norm counts only on the lowest mesh row with the chunk."""
        is_one_chunk, index = self.spec.chunks.is_one_chunk_per_worker, self._index(True, chunk)

        def put(all_K: jax.Array, values: jax.Array) -> jax.Array:
            at = all_K.at[iteration] if is_one_chunk else all_K.at[iteration, index]
            return at.set(values, mode="drop")

        counts = self._counts(chunk)
        square = jnp.where(counts, record.square_norm, jnp.zeros_like(record.square_norm))
        names = ("load", "replicas_LE", "imbalance_L")
        by_layer = {name: jax.tree.map(put, getattr(records_K, name), getattr(record, name)) for name in names}
        return UpdateRecord(
            square_norm=records_K.square_norm.at[iteration].add(square),
            learning_rate=records_K.learning_rate.at[iteration].set(record.learning_rate),
            **by_layer,
        )

    def put_gradients(
        self, all_K: dict[str, Any], chunk_gradients: dict[str, Any], chunk: Index, iteration: Index
    ) -> dict[str, Any]:
        """Puts a chunk's gradients into the gradients ``[K, layer, ...]`` of the master weights by group."""
        ends = EmbeddingAndHead.of(self.spec, chunk)
        is_used = {"embedding": ends.is_first, "head": ends.is_last}

        def put(name: str) -> jax.Array:
            if self.spec.chunks.is_one_chunk_per_worker:
                return all_K[name].at[iteration].set(chunk_gradients[name])
            if name in is_used:
                return jnp.where(is_used[name], all_K[name].at[iteration].set(chunk_gradients[name]), all_K[name])
            return all_K[name].at[iteration, self._index(KINDS[name], chunk)].set(chunk_gradients[name], mode="drop")

        return {name: put(name) for name in all_K}

    def _counts(self, chunk: Index) -> Any:
        lowest_CR = np.zeros((len(self.spec.peers_C) + 1, self.spec.live.num_live), bool)  # the last row is for NONE
        for number, rows in enumerate(self.spec.peers_C):
            lowest_CR[number, rows[0]] = True
        return jnp.asarray(lowest_CR)[chunk, self.spec.live.row_index()]

    def _index(self, is_moe: bool | None, chunk: Index) -> jax.Array:
        """Returns the stack indices for a chunk's layers of a kind, int32[n]; past the end for padding and ``NONE``."""
        chunks = self.spec.chunks
        number_n = jnp.arange(chunks.ops.stack_size(is_moe), dtype=jnp.int32)
        counts = jnp.asarray([*chunks.ops.counts(is_moe), 0], jnp.int32)  # the last count is for NONE
        first = jnp.asarray(chunks.first_layers(is_moe))[self.holding, chunk]
        return jnp.where(number_n < counts[chunk], first + number_n, chunks.stack_size(is_moe))


def group_of(path: Sequence[Any]) -> str | None:
    """Returns the parameter group of a leaf in a state, or None for leaves without a group, such as counters."""
    return next((entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)), None)


def _taken(tree: _Tree, index_n: jax.Array, *, padding: Any = 0) -> _Tree:
    """Takes layers from stacks; an index beyond the end gives ``padding``, or the last layer if ``padding`` is None."""
    options: dict[str, Any] = {"mode": "clip"} if padding is None else {"mode": "fill", "fill_value": padding}
    return jax.tree.map(lambda leaf: jnp.take(leaf, index_n, axis=0, **options), tree)


def _selected(is_new: Any, new: _Tree, old: _Tree) -> _Tree:
    return jax.tree.map(lambda a, b: jnp.where(is_new, a, b), new, old)


class ChunkUpdate(NamedTuple):
    """Intermediate result of a chunk's U, after its first half; only the factor that clips the gradients is missing."""

    chunk: Index
    state: TrainState  # of the chunk, before the update
    gradients: dict[str, jax.Array]  # of the master weights, by group
    record: UpdateRecord


class _RankContext(NamedTuple):
    """Context of a rank before a step function's first tick; valid while the step function is being traced."""

    spec: StepSpec
    stage: ForwardStage
    interpreter: Interpreter
    start: Carry
    batch: DeviceBatch
    tokens_K: jax.Array  # int32, tokens of the iterations' global batches
    weight_K: Any  # sums of their losses' weights; None without weights
    layers: ChunkLayers
    hot_rows: HotRows

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
        *,
        trains: bool = True,
    ) -> "_RankContext":
        """Splits the blocks (unless ``trains`` is False), counts the tokens and allocates empty buffers."""
        message = jnp.zeros((*batch.inputs.shape[1:], spec.gpt.config.model_dim), spec.compute_dtype)
        holding = jnp.asarray(spec.holding_R)[spec.live.row_index()]
        hot_rows = HotRows.choose(spec, batch.inputs, jnp.asarray(columns.token_iteration_n), num_iterations)
        weights = StageWeights.of(spec.gpt, spec.chunks, state.slots, holding, hot_rows.no_copies)
        extras = Extras.of(spec, state.placement, jax.tree.map(lambda leaf: leaf[0], batch), holding)
        stage = Stage.of(spec, weights.layers, extras, message, holding) if trains else ForwardStage(spec, holding)
        permutations = table.activations.permutations, table.gradients.permutations
        tokens_n = batch.valid.sum(axis=(1, 2), dtype=jnp.int32)
        in_iteration_Kn = jnp.arange(num_iterations, dtype=jnp.int32)[:, None] == columns.token_iteration_n[None]

        def in_iterations(sum_n: jax.Array) -> jax.Array:
            total_K = jnp.sum(in_iteration_Kn * sum_n[None], axis=1, dtype=sum_n.dtype)
            return _sum_over_all_ranks(spec, total_K)

        return cls(
            spec,
            stage,
            Interpreter(permutations, common, columns, message, spec.chunks.have_neighbours),
            empty_carry(spec, table, stage, weights, message, num_iterations),
            batch,
            in_iterations(tokens_n),
            None if batch.weights is None else in_iterations(batch.weights.sum((1, 2), dtype=spec.accumulate_dtype)),
            ChunkLayers(spec, holding),
            hot_rows,
        )

    @property
    def divisor_K(self) -> jax.Array:
        """Divisors for the iterations' sums over their global batches, see ``loss_divisor``."""
        return loss_divisor(self.tokens_K, self.weight_K, self.spec.accumulate_dtype)

    @property
    def static_chunk(self) -> Any:
        """Chunk that the worker holds, or None if workers may hold several."""
        worker_chunks = self.spec.chunks.worker_chunks
        return (
            jnp.asarray([chunk for chunk, *_ in worker_chunks])[self.layers.holding]
            if self.spec.chunks.is_one_chunk_per_worker
            else None
        )

    def chunks(self) -> list[tuple[Any, PeerAllReduce]]:
        """Returns the worker's chunk in every round, with the round's sum over the workers that hold the same chunk."""
        chunk_T = jnp.asarray(self.spec.rounds.chunk_HT)[self.layers.holding]
        return [(chunk_T[index], peer_sum) for index, peer_sum in enumerate(self.spec.rounds.sums)]

    def named_round(self, round_index: int) -> AbstractContextManager[None]:
        """Returns the name scope for the updates of a round; no scope if there is only one round."""
        return jax.named_scope(f"{scopes.ROUND}{round_index}") if len(self.spec.rounds.sums) > 1 else nullcontext()

    def ends(self, chunk: Any) -> EmbeddingAndHead:
        """Returns whether a chunk is the model's first, and whether it is the last."""
        return EmbeddingAndHead.of(self.spec, chunk)

    def first_copies(self, state: TrainState) -> Any:
        """Fetches copies of the embedding's rows for the first iteration, on workers that embed tokens."""
        embeds = jnp.asarray(self.spec.chunks.holds_HC[:, 0])[self.layers.holding]
        return self.hot_rows.fetch(state.slots, 0, embeds, self.hot_rows.no_copies)

    def ops(self, state: TrainState, copies: Any) -> StageOps:
        """Returns the worker's ops with a state's weights and copies of rows; valid until the next update."""
        spec = self.spec
        assert isinstance(self.stage, Stage)
        weights = StageWeights.of(spec.gpt, spec.chunks, state.slots, self.layers.holding, copies)
        aux_weight_K = spec.experts.auxiliary_weight * self.divisor_K / spec.num_microbatches
        return StageOps(
            spec, self.stage, weights, state.placement, self.static_chunk, self.batch, aux_weight_K, self.hot_rows
        )

    def reduce(
        self,
        state: TrainState,
        totals: StageWeights,
        sums_K: Sums,
        iteration: Any,
        chunk: Any,
        peer_sum: PeerAllReduce | SumInRound,
        tied: Mapping[str, jax.Array] = MappingProxyType({}),
    ) -> ChunkUpdate:
        """Runs the first half of a chunk's U.

        Args:
            state: state of the worker.
            totals: gradients of the worker's weights, summed over its micro-batches.
            sums_K: sums of each iteration.
            iteration: the iteration that ends.
            chunk: chunk to update.
            peer_sum: sum over the workers that hold the chunk.
            tied: gradients that are already reduced, from the method ``tied``; their norm counts with the first chunk.
        """
        spec, chunk_state, ends = self.spec, self.layers.state(state, chunk), self.ends(chunk)
        totals = self.hot_rows.collect(totals, iteration, ends.is_first)
        packed = self.layers.totals(totals, chunk).packed(spec.gpt, spec.chunks.ops, chunk)
        packed = {name: stack for name, stack in packed.items() if name not in tied}
        gradients = reduce_gradients(spec, chunk_state, packed, self.divisor_K[iteration], ends, peer_sum)
        counted = gradients | {name: jnp.where(ends.is_first, g, jnp.zeros_like(g)) for name, g in tied.items()}
        counts = sums_K.without_numbers.load
        load = self.layers.of_stack(jax.tree.map(lambda load_K: load_K[iteration], counts), chunk)
        with jax.named_scope(scopes.UPDATE):
            load = peer_sum(jax.tree.map(lambda counts: lax.psum(counts, EXPERT_AXIS), load))
        square = square_norm(spec, counted, chunk_state.placement)
        return ChunkUpdate(chunk, chunk_state, {**gradients, **tied}, UpdateRecord.of(spec, chunk_state, square, load))

    def apply(
        self, state: TrainState, update: ChunkUpdate, scale: jax.Array | None, *, ends_iteration: Any
    ) -> TrainState:
        """Runs the second half of a chunk's U, with gradients times ``scale``, if any; returns the worker's state."""
        popularity_LE, ends = update.record.load.popularity_E, self.ends(update.chunk)
        after = apply_gradients(self.spec, update.state, update.gradients, popularity_LE, ends, scale)
        return self.layers.put_state(state, after, update.chunk, ends_iteration=ends_iteration)

    def tied(self, state: TrainState, totals: StageWeights) -> dict[str, jax.Array]:
        """Returns the reduced gradient, by group, of an embedding shared by first and last chunk, or an empty dict."""
        if not self.spec.ties_stages:
            return {}
        return reduce_tied(self.spec, state, totals.packed_embedding(self.spec.gpt), self.divisor_K[0])

    def empty_records(self, state: TrainState, num_iterations: int, *, keep_gradients: bool = False) -> tuple[Any, ...]:
        """Returns empty records ``[K, ...]``, followed by empty gradients of the master weights if these are kept."""

        def record(state: TrainState, sums: Sums) -> UpdateRecord:
            load = jax.tree.map(lambda load_K: load_K[0], sums.without_numbers.load)
            return UpdateRecord.of(self.spec, state, jnp.zeros((), self.spec.accumulate_dtype), load)

        shapes = jax.eval_shape(record, state, self.start.sums), state.master
        record_shapes = shapes if keep_gradients else shapes[:1]
        return jax.tree.map(lambda leaf: jnp.zeros((num_iterations, *leaf.shape), leaf.dtype), record_shapes)

    def put_records(self, outcome: Any, update: ChunkUpdate, iteration: Any) -> Any:
        """Puts a chunk's record, and its gradients if these are kept, into the outcome of the window."""
        records, *gradients_K = outcome
        chunk, _, gradients, record = update
        records = self.layers.put_record(records, record, chunk, iteration)
        return records, *(self.layers.put_gradients(all_K, gradients, chunk, iteration) for all_K in gradients_K)

    def norm(self, square_K: jax.Array) -> jax.Array:
        """Computes the norms of the whole model's gradients from the chunks' squared norms, equal on all ranks."""
        # Every expert rank holds its worker's squared norm, so the sum over all ranks counts it num_ranks times.
        return jnp.sqrt(_sum_over_all_ranks(self.spec, square_K) / self.spec.live.num_ranks)

    def metrics(self, sums_K: Sums, norm_K: jax.Array, record: UpdateRecord) -> dict[str, jax.Array]:
        """Computes the metrics of the window; ``record`` has a leading dim K."""
        own_numbers = in_model_order(self.spec, sums_K.load.numbers, self.layers.holding)
        loss_K, aux_K, numbers = sum_together((sums_K.loss, sums_K.aux, own_numbers), _all_ranks(self.spec))
        record = over_stages(self.spec, record)
        aux_K = aux_K / self.spec.num_microbatches
        return metrics_of(loss_K, aux_K, self.tokens_K, self.weight_K, norm_K, record, numbers)


def _all_ranks(spec: StepSpec) -> tuple[str, ...]:
    """Returns the mesh axes of all ranks of all workers."""
    return (EXPERT_AXIS,) if spec.live.num_live == 1 else (WORKER_AXIS, EXPERT_AXIS)


def _sum_over_all_ranks(spec: StepSpec, value: jax.Array) -> jax.Array:
    """Sums over all ranks of all workers."""
    return lax.psum(value, _all_ranks(spec))


def window_step(spec: StepSpec, table: TickTable, num_iterations: int, *, keep_gradients: bool = False) -> Wrapped:
    """Returns the jitted window: (state, common, columns, batch ``[worker, n, rank, B, T]``) -> (state, metrics, ok).

    The old state is left unchanged. Metrics are ``[worker, K, ...]``, see ``metrics_of``. ``ok`` is bool[worker], the
    same on all workers: every gradient was finite and none had to be clipped. If not ``ok``, the new state is invalid.

    Args:
        spec: step spec, on the live mesh whose rows the table has columns for.
        table: tick table of K iterations; only its shape is used.
        num_iterations: K.
        keep_gradients: whether to return a fourth result, for tests: the iterations' mean gradients of the master
            weights by group, ``[worker, K, rank, ...]``.
    """
    assert not spec.sums_need_all, "a sum over peers that needs all workers cannot be part of a staggered update"

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Any:
        rank = _RankContext.enter(spec, table, num_iterations, state, common, columns, batch)

        def phase(loop: Any, now: Any) -> tuple[Any, None]:
            (state, copies, carry, outcome), ((first, end), iteration, chunk, ends_iteration) = loop, now
            chunk = chunk if rank.static_chunk is None else rank.static_chunk
            carry = rank.interpreter.run(rank.ops(state, copies), first, end, carry)

            def update(state: TrainState, copies: Any, totals: StageWeights, outcome: Any) -> Any:
                begun = rank.reduce(state, totals, carry.sums, iteration, chunk, spec.rounds.sum_of(chunk))
                # The chunk's norm is at most the model's, so the scale is 1 in a window that counts. Without it XLA
                # would fuse and round the update differently from ``barrier_step``, and the results would not be
                # bit-identical.
                scale = clip_scale(spec, jnp.sqrt(begun.record.square_norm))
                after = rank.apply(state, begun, scale, ends_iteration=ends_iteration)
                with jax.named_scope(scopes.UPDATE):
                    copies = rank.hot_rows.fetch(after.slots, iteration + 1, rank.ends(chunk).is_first, copies)
                cleared = rank.layers.cleared(totals, chunk)
                return after, copies, cleared, rank.put_records(outcome, begun, iteration)

            state, copies, totals, outcome = lax.cond(
                iteration >= 0, update, lambda *same: same, state, copies, carry.totals, outcome
            )
            return (state, copies, carry.with_totals(totals), outcome), None

        records = rank.empty_records(state, num_iterations, keep_gradients=keep_gradients)
        start = state, rank.first_copies(state), rank.start, records
        loop, _ = lax.scan(phase, start, (common.phases_H2, *columns.updates))
        after, _, carry, (record, *gradients_K) = loop
        norm_K = rank.norm(record.square_norm)
        most = jnp.inf if spec.clip_norm is None else spec.clip_norm
        ok = jnp.all(jnp.isfinite(norm_K) & (norm_K <= most))
        return (after, rank.metrics(carry.sums, norm_K, record), ok, *gradients_K)

    out_specs = (spec.specs, SHARED, SHARED, *[RANKED] * keep_gradients)
    return spec.jitted(per_rank, (spec.specs, *_IN), out_specs)


def barrier_step(spec: StepSpec, table: TickTable, *, keep_state: bool = False) -> Wrapped:
    """Returns the jitted iteration with exact gradient clipping: (state, common, columns, batch) -> (state, metrics).

    The old state's buffers are donated, unless ``keep_state``. Metrics are ``[worker, 1, ...]``. Unlike a window,
    this step also works if a sum over the peers of a chunk involves all workers (TPU).

    Args:
        spec: step spec, on the live mesh whose rows the table has columns for.
        table: tick table of one iteration; only its shape is used. Its updates are ignored: all stages update at the
            end.
        keep_state: whether to leave the old state unchanged.
    """

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Any:
        rank = _RankContext.enter(spec, table, 1, state, common, columns, batch)
        carry = rank.interpreter.run(rank.ops(state, rank.first_copies(state)), 0, common.phases_H2[-1, 1], rank.start)
        outcome, updates, tied = rank.empty_records(state, 1), [], rank.tied(state, carry.totals)
        for round_index, (chunk, peer_sum) in enumerate(rank.chunks()):
            with rank.named_round(round_index):
                updates.append(rank.reduce(state, carry.totals, carry.sums, 0, chunk, peer_sum, tied))
            outcome = rank.put_records(outcome, updates[-1], 0)
        norm_K = rank.norm(outcome[0].square_norm)
        scale = clip_scale(spec, norm_K[0])
        for round_index, update in enumerate(updates):
            with rank.named_round(round_index):
                state = rank.apply(state, update, scale, ends_iteration=round_index == len(updates) - 1)
        return state, rank.metrics(carry.sums, norm_K, outcome[0])

    donated = () if keep_state else 0
    return spec.jitted(per_rank, (spec.specs, *_IN), (spec.specs, SHARED), donate_argnums=donated)


def evaluation_step(spec: StepSpec, table: TickTable) -> Wrapped:
    """Returns the jitted evaluation: (state, common, columns, batch) -> sums ``[worker]``, on unchanged weights.

    Validation drops tokens as training does.

    Args:
        spec: step spec, on the live mesh whose rows the table has columns for.
        table: tick table with F alone, see ``TickTable.forward_only``.
    """

    def per_rank(state: TrainState, common: Common, columns: Columns, batch: DeviceBatch) -> Sums:
        rank = _RankContext.enter(spec, table, 1, state, common, columns, batch, trains=False)
        weights = StageWeights.of(spec.gpt, spec.chunks, state.slots, rank.layers.holding)
        ops = EvaluationOps(spec, rank.stage, weights, state.placement, rank.static_chunk, batch)
        sums = rank.interpreter.evaluate(ops, common.phases_H2[-1, 1], rank.start).without_numbers
        return jax.tree.map(lambda leaf: _sum_over_all_ranks(spec, leaf[0]), sums)

    return spec.jitted(per_rank, (spec.specs, *_IN), SHARED)
