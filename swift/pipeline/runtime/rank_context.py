"""The context of a step function on one rank: its stage, its interpreter, and the sums that its updates need.

Legend: K iterations of the window, n micro-batches of a worker.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swift.mesh.peer_reduce import PeerSum
from swift.mesh.per_rank import EXPERT_AXIS, WORKER_AXIS
from swift.pipeline import scopes
from swift.pipeline.chunk_rounds import SumInRound
from swift.pipeline.runtime.chunk_layers import ChunkLayers
from swift.pipeline.runtime.interpreter import Carry, Interpreter, empty_carry
from swift.pipeline.runtime.metrics import Sums, UpdateRecord, metrics_of, over_stages
from swift.pipeline.runtime.stage.block import Extras
from swift.pipeline.runtime.stage.forward_stage import ForwardStage
from swift.pipeline.runtime.stage.hot_rows import HotRows
from swift.pipeline.runtime.stage.stage import Stage
from swift.pipeline.runtime.stage.stage_ops import StageOps
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.runtime.tick_arrays import Columns, Common
from swift.pipeline.runtime.update import (
    EmbeddingAndHead,
    reduce_gradients,
    reduce_tied,
    square_norm,
)
from swift.pipeline.stage_weights import StageWeights
from swift.pipeline.train_state import DeviceBatch, TrainState
from swift.schedules.lowering.tick_table import TickTable


class RankContext(NamedTuple):
    """A rank's context before the first tick of a step function; lives as long as its trace."""

    spec: StepSpec
    stage: ForwardStage
    interpreter: Interpreter
    start: Carry
    batch: DeviceBatch
    tokens_K: jax.Array  # int32, of the iterations' global batches
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
    ) -> "RankContext":
        """Splits the blocks, unless they are only evaluated, counts the tokens and empties the buffers."""
        message = jnp.zeros((*batch.inputs.shape[1:], spec.gpt.config.model_dim), spec.compute_dtype)
        holding = jnp.asarray(spec.holding_R)[spec.live.row_index()]
        hot_rows = HotRows.choose(spec, batch.inputs, jnp.asarray(columns.token_iteration_n), num_iterations)
        weights = StageWeights.of(spec.gpt, spec.chunks, state.slots, holding, hot_rows.no_copies)
        extras = Extras.of(spec, state.placement, jax.tree.map(lambda leaf: leaf[0], batch))
        stage = Stage.of(spec, weights.layers, extras, message, holding) if trains else ForwardStage(spec, holding)
        permutations = table.activations.permutations, table.gradients.permutations
        tokens_n = batch.valid.sum(axis=(1, 2), dtype=jnp.int32)
        is_of_Kn = jnp.arange(num_iterations, dtype=jnp.int32)[:, None] == columns.token_iteration_n[None]
        return cls(
            spec,
            stage,
            Interpreter(permutations, common, columns, message, spec.chunks.have_neighbours),
            empty_carry(spec, table, stage, weights, message, num_iterations),
            batch,
            everywhere(spec, jnp.sum(is_of_Kn * tokens_n[None], axis=1, dtype=jnp.int32)),
            ChunkLayers(spec, holding),
            hot_rows,
        )

    @property
    def divisor_K(self) -> jax.Array:
        """Divisors of the iterations' sums: the tokens of their global batches."""
        return jnp.maximum(self.tokens_K, 1).astype(self.spec.accumulate_dtype)

    @property
    def own_chunk(self) -> Any:
        """The chunk that the worker holds; None if workers may hold several."""
        held = self.spec.chunks.holdings
        return jnp.asarray([chunk for chunk, *_ in held])[self.layers.holding] if self.spec.chunks.are_single else None

    def chunks(self) -> list[tuple[Any, PeerSum]]:
        """The worker's chunk in every round, and the sum of the round over the workers that have the same one."""
        chunk_T = jnp.asarray(self.spec.rounds.chunk_HT)[self.layers.holding]
        return [(chunk_T[turn], peer_sum) for turn, peer_sum in enumerate(self.spec.rounds.sums)]

    def named_round(self, turn: int) -> AbstractContextManager[None]:
        """The context of the updates of a round, whose name instructions carry if there are several."""
        return jax.named_scope(f"{scopes.ROUND}{turn}") if len(self.spec.rounds.sums) > 1 else nullcontext()

    def ends(self, chunk: Any) -> EmbeddingAndHead:
        """Whether a chunk is the model's first and last."""
        return EmbeddingAndHead.of(self.spec, chunk)

    def first_copies(self, state: TrainState) -> Any:
        """Copies of the embedding's rows for the first iteration, on workers that embed tokens."""
        embeds = jnp.asarray(self.spec.chunks.holds_HC[:, 0])[self.layers.holding]
        return self.hot_rows.fetch(state.slots, 0, embeds, self.hot_rows.no_copies)

    def ops(self, state: TrainState, copies: Any) -> StageOps:
        """The worker's ops with the weights of a state and copies of rows, which hold until the next update."""
        spec = self.spec
        assert isinstance(self.stage, Stage)
        weights = StageWeights.of(spec.gpt, spec.chunks, state.slots, self.layers.holding, copies)
        aux_weight_K = spec.experts.auxiliary_weight * self.divisor_K / spec.num_microbatches
        return StageOps(
            spec, self.stage, weights, state.placement, self.own_chunk, self.batch, aux_weight_K, self.hot_rows
        )

    def reduce(
        self,
        state: TrainState,
        totals: StageWeights,
        sums_K: Sums,
        iteration: Any,
        chunk: Any,
        peer_sum: PeerSum | SumInRound,
        tied: Mapping[str, jax.Array] = MappingProxyType({}),
    ) -> tuple[TrainState, dict[str, jax.Array], UpdateRecord]:
        """The first half of a chunk's U: its state, gradients of its master weights, and the record of the iteration.

        Args:
            state: state of the worker.
            totals: gradients of the worker's weights, summed over its micro-batches.
            sums_K: sums of each iteration.
            iteration: the iteration that ends.
            chunk: chunk to update.
            peer_sum: sum over the workers that hold it.
            tied: gradients that are reduced already, see ``tied``; their norm counts with the first chunk.
        """
        spec, of_chunk, ends = self.spec, self.layers.state(state, chunk), self.ends(chunk)
        totals = self.hot_rows.collect(totals, iteration, ends.is_first)
        packed = self.layers.totals(totals, chunk).packed(spec.gpt, spec.chunks.ops, chunk)
        packed = {name: stack for name, stack in packed.items() if name not in tied}
        gradients = reduce_gradients(spec, of_chunk, packed, self.divisor_K[iteration], ends, peer_sum)
        counted = gradients | {name: jnp.where(ends.is_first, g, jnp.zeros_like(g)) for name, g in tied.items()}
        load = self.layers.of_stack(jax.tree.map(lambda load_K: load_K[iteration], sums_K.load), chunk)
        with jax.named_scope(scopes.UPDATE):
            load = peer_sum(jax.tree.map(lambda counts: lax.psum(counts, EXPERT_AXIS), load))
        square = square_norm(spec, counted, of_chunk.placement)
        return of_chunk, {**gradients, **tied}, UpdateRecord.of(spec, of_chunk, square, load)

    def tied(self, state: TrainState, totals: StageWeights) -> dict[str, jax.Array]:
        """The gradient of an embedding that first and last chunk share, by group; none where they do not."""
        if not self.spec.ties_stages:
            return {}
        return reduce_tied(self.spec, state, totals.packed_embedding(self.spec.gpt), self.divisor_K[0])

    def nothing_kept(self, state: TrainState, num_iterations: int, *, keep_gradients: bool = False) -> tuple[Any, ...]:
        """Empty records, and gradients of the master weights if they are kept, ``[K, ...]``."""

        def record(state: TrainState, sums: Sums) -> UpdateRecord:
            load = jax.tree.map(lambda load_K: load_K[0], sums.load)
            return UpdateRecord.of(self.spec, state, jnp.zeros((), self.spec.accumulate_dtype), load)

        shapes = jax.eval_shape(record, state, self.start.sums), state.master
        kept = shapes if keep_gradients else shapes[:1]
        return jax.tree.map(lambda leaf: jnp.zeros((num_iterations, *leaf.shape), leaf.dtype), kept)

    def kept(self, kept: Any, record: UpdateRecord, gradients: dict[str, Any], chunk: Any, iteration: Any) -> Any:
        """The records, and the gradients, with those of a chunk."""
        records, *of_gradients = kept
        records = self.layers.put_record(records, record, chunk, iteration)
        return records, *(self.layers.put_gradients(one, gradients, chunk, iteration) for one in of_gradients)

    def norm(self, square_K: jax.Array) -> jax.Array:
        """The norms of the whole model's gradients, from the squared norms of the chunks': all ranks know the same."""
        return jnp.sqrt(everywhere(self.spec, square_K) / self.spec.live.num_ranks)

    def metrics(self, sums_K: Sums, norm_K: jax.Array, record: UpdateRecord) -> dict[str, jax.Array]:
        """The metrics of the window; ``record`` has a leading dim K."""
        loss_K, aux_K = (everywhere(self.spec, one) for one in (sums_K.loss, sums_K.aux))
        record = over_stages(self.spec, record)
        return metrics_of(loss_K, aux_K / self.spec.num_microbatches, self.tokens_K, norm_K, record)


def everywhere(spec: StepSpec, value: jax.Array) -> jax.Array:
    """The sum over all ranks of all workers."""
    axes = (EXPERT_AXIS,) if spec.live.num_live == 1 else (WORKER_AXIS, EXPERT_AXIS)
    return lax.psum(value, axes)
