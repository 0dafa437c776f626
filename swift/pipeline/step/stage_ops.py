"""F, B and W of one micro-batch on buffers: read the inbox or a stash, compute, write a stash or accumulate.

Only the first and the last chunk differ. The first chunk's F embeds its tokens, and its B turns the input's gradient
into the embedding's. The last chunk's F computes the loss, its gradient and the head's gradient at once, so that logits
are never stored.

If ranks share the embedding's rows, each rank has copies of its hot tokens' rows: ``HotRows`` fetches them before an
iteration and sends their gradients after it. All expert ranks of a worker begin and end an iteration at the same time,
so these exchanges may be inside a branch that depends on the worker.

Legend: K iterations of the window, n micro-batches of a worker, H hot tokens of a rank, B sequences of this rank,
T positions, D model dim.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swift.models.vocabulary.lookup import HotRowCache, add_gradients_of_copies, choose_hot_rows, fetch_copies
from swift.pipeline import scopes
from swift.pipeline.split_backward.partition import Stashes
from swift.pipeline.state import DeviceBatch, EmbeddingWeights, Index, Layers, StageWeights, layer_of, put
from swift.pipeline.step.metrics import Sums
from swift.pipeline.step.spec import StepSpec
from swift.pipeline.step.stage import Extras, ForwardStage, Stage
from swift.pipeline.step.tick_arrays import TickOp
from swift.pipeline.step.update import EmbeddingAndHead, cond_unless_static


@dataclass(frozen=True)
class HotRows:
    """Hot embedding rows on a rank in each iteration of a window; the methods do nothing if the spec has none.

    Attributes:
        spec: step spec.
        hot_KH: int32, tokens whose rows are copied, see ``choose_hot_rows``.
    """

    spec: StepSpec
    hot_KH: jax.Array

    @classmethod
    def choose(
        cls, spec: StepSpec, inputs_nBT: Int[Array, "n B T"], iteration_n: Int[Array, " n"], num_iterations: int
    ) -> "HotRows":
        """Chooses the hot rows by the tokens that this rank embeds.

        Args:
            spec: step spec.
            inputs_nBT: int32, tokens of this rank.
            iteration_n: int32, the iteration in which this worker embeds each micro-batch; -1 if another worker does.
            num_iterations: K.
        """
        if not spec.num_hot_rows:
            return cls(spec, jnp.zeros((num_iterations, 0), jnp.int32))
        tokens_nT = inputs_nBT.reshape(len(inputs_nBT), -1)
        return cls(
            spec, choose_hot_rows(tokens_nT, iteration_n, num_iterations, spec.gpt.vocab_size, spec.num_hot_rows)
        )

    @property
    def no_copies(self) -> Any:
        """Zeros with the shape of the copies, ``[H, D]``; an empty tree without hot rows."""
        shape = self.hot_KH.shape[1], self.spec.gpt.config.model_dim
        return jnp.zeros(shape, self.spec.compute_dtype) if self.spec.num_hot_rows else ()

    def at(self, iteration: Any, copies: Any) -> HotRowCache | None:
        """Returns the copies of an iteration with their row numbers, or None without hot rows."""
        return HotRowCache(self.hot_KH[iteration], copies) if self.spec.num_hot_rows else None

    def fetch(self, slots: dict[str, jax.Array], iteration: Any, is_first: Any, copies: Any) -> Any:
        """Fetches the copies of an iteration.

        Args:
            slots: slots of this rank, with the weights at the start of the iteration.
            iteration: iteration of the window; for one beyond its end, nothing is fetched.
            is_first: whether the worker embeds tokens; if not, nothing is fetched.
            copies: copies to return if nothing is fetched.
        """
        if not self.spec.num_hot_rows:
            return copies

        def fetched() -> jax.Array:
            shard = self.spec.gpt.slot_groups["embedding"].unpack_stack(slots["embedding"][:, 0])
            return fetch_copies(shard["token_VD"][...][0], self.hot_KH[iteration], self.spec.live.num_ranks)

        with jax.named_scope(f"{scopes.COPIES}/embedding"):
            return cond_unless_static(is_first & (iteration < len(self.hot_KH)), fetched, lambda: copies)

    def collect(self, totals: StageWeights, iteration: Any, is_first: Any) -> StageWeights:
        """Adds the gradients of an iteration's copies to the embedding's, on the rows' owners; first chunk only."""
        spec = self.spec
        if not spec.num_hot_rows:
            return totals

        def added(embedding: EmbeddingWeights) -> EmbeddingWeights:
            shard = jax.tree.map(lambda leaf: leaf, embedding.shard)  # a copy of the tree, which is modified below
            token_vD, hot_H = shard["token_VD"], self.hot_KH[iteration]
            ranks, wire = spec.live.num_ranks, spec.row_wire_dtype
            total_vD = add_gradients_of_copies(token_vD[...][0], embedding.copies, hot_H, ranks, wire)
            shard["token_VD"] = token_vD.replace(total_vD[None])
            return EmbeddingWeights(shard, jnp.zeros_like(embedding.copies))

        with jax.named_scope(f"{scopes.UPDATE}/{scopes.COPIES}/embedding"):
            return totals._replace(embedding=cond_unless_static(is_first, added, lambda same: same, totals.embedding))


@dataclass(frozen=True)
class EvaluationOps:
    """Op of one rank's stage in an evaluation; holds traced arrays, so create it while tracing a step function.

    Attributes:
        spec: step spec.
        stage: the stage's blocks.
        weights: weights of the stage, embedding and head.
        placement_LNS: int32, the expert in every slot.
        static_chunk: the only chunk that the worker holds, or None if it may hold several; then each op gives its
            chunk.
        batch: the worker's micro-batches, ``[n, B, T]``.
    """

    spec: StepSpec
    stage: ForwardStage
    weights: StageWeights
    placement_LNS: jax.Array
    static_chunk: Index | None
    batch: DeviceBatch

    def evaluate(
        self, op: TickOp, activations: Float[Array, "_ B T D"], sums: Sums
    ) -> tuple[Float[Array, "B T D"], Sums]:
        """Runs F without a backward pass: returns (message to the next stage, updated sums)."""
        data = self._data(op)
        x = self._input(op, data, activations)
        y, aux, load = self.stage.evaluate(self.weights.layers, self._extras(data), x, self._chunk(op))

        def end(sums: Sums) -> Sums:
            return _sums_of(sums, op.iteration, loss=self._loss(self.weights.head, y, data), **self._counted(data))

        sums = _sums_of(sums, op.iteration, aux=aux, load=load)
        return y, cond_unless_static(self._ends(op).is_last, end, lambda same: same, sums)

    def _chunk(self, op: TickOp) -> Index:
        return op.chunk if self.static_chunk is None else self.static_chunk

    def _ends(self, op: TickOp) -> EmbeddingAndHead:
        return EmbeddingAndHead.of(self.spec, self._chunk(op))

    def _embed(self, op: TickOp, data: DeviceBatch) -> jax.Array:
        weights = {"embedding": [layer_of(self.weights.embedding.shard, 0)]}
        with _named(scopes.EMBEDDING, self.spec.gpt.embedding_ranks):
            return self.spec.gpt.embed(weights, data.inputs, copies=self._copies(op))

    def _copies(self, op: TickOp) -> HotRowCache | None:
        """Returns the copies of rows for an op's lookup, or None: an evaluation uses none."""
        del op
        return None

    def _loss(self, head: Any, y: jax.Array, data: DeviceBatch) -> jax.Array:
        weights = {name: [layer_of(stack, 0)] for name, stack in head.items()}
        with _named(scopes.HEAD, self.spec.gpt.head_ranks):
            return self.spec.gpt.head_loss(weights, y, data.labels, data.valid, data.weights)

    def _counted(self, data: DeviceBatch) -> dict[str, Any]:
        """Returns the sums of a micro-batch's tokens and of their losses' weights."""
        weights = None if data.weights is None else data.weights.sum(dtype=self.spec.accumulate_dtype)
        return {"tokens": data.valid.sum(dtype=jnp.int32), "weight": weights}

    def _data(self, op: TickOp) -> DeviceBatch:
        return jax.tree.map(lambda leaf: leaf[op.data], self.batch)

    def _extras(self, data: DeviceBatch) -> Extras:
        return Extras.of(self.spec, self.placement_LNS, data, self.stage.holding)

    def _input(self, op: TickOp, data: DeviceBatch, activations: jax.Array) -> jax.Array:
        return cond_unless_static(self._ends(op).is_first, lambda: self._embed(op, data), lambda: activations[op.inbox])


@dataclass(frozen=True)
class StageOps(EvaluationOps):
    """Ops of one rank's stage in a step.

    Attributes:
        stage: the stage's blocks as F, B and W.
        aux_weight_K: weight of the auxiliary loss in each iteration, relative to the tokens' weighted losses.
        hot_rows: rows whose copies the weights contain.
    """

    stage: Stage
    aux_weight_K: jax.Array
    hot_rows: HotRows

    def forward(
        self,
        op: TickOp,
        activations: Float[Array, "_ B T D"],
        gradients: Float[Array, "_ B T D"],
        stashes: Stashes,
        sums: Sums,
        head: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "_ B T D"], Stashes, Sums, Any]]:
        """Runs F: returns (message to the next stage, updated buffers); the last chunk adds its loss."""
        data = self._data(op)
        x, chunk = self._input(op, data, activations), self._chunk(op)
        y, aux, load, stashes = self.stage.forward(
            self.weights.layers, self._extras(data), x, stashes, op.stash_slots, chunk
        )
        updated_sums = _sums_of(sums, op.iteration, aux=aux, load=load)

        def end(gradients: jax.Array, sums: Sums, head: Any) -> tuple[jax.Array, Sums, Any]:
            value, (d_head, dy) = jax.value_and_grad(self._loss, argnums=(0, 1))(self.weights.head, y, data)
            sums = _sums_of(sums, op.iteration, loss=value, **self._counted(data))
            return put(gradients, op.loss, dy), sums, _add(head, d_head)

        gradients, updated_sums, head = cond_unless_static(
            self._ends(op).is_last, end, lambda *same: same, gradients, updated_sums, head
        )
        return y, (gradients, stashes, updated_sums, head)

    def backward_input(
        self, op: TickOp, gradients: Float[Array, "_ B T D"], stashes: Stashes, embedding: Any
    ) -> tuple[Float[Array, "B T D"], tuple[Any, Any]]:
        """Runs B: returns (message to the previous stage, (W's stash, accumulated gradient of the embedding))."""
        data, d_out, chunk = self._data(op), self._d_out(op, gradients), self._chunk(op)
        dx, for_w = self.stage.backward_input(
            self.weights.layers, self._extras(data), stashes, op.stash_slots, d_out, chunk
        )
        return dx, (for_w, self._embedded(op, data, dx, embedding))

    def backward_weight(self, op: TickOp, stashes: Stashes, layers: Layers) -> Layers:
        """Runs W: returns the accumulated gradients of the stage's weights."""
        extras, chunk = self._extras(self._data(op)), self._chunk(op)
        return self.stage.backward_weight(self.weights.layers, extras, stashes, op.stash_slots, layers, chunk)

    def backward(
        self, op: TickOp, gradients: Float[Array, "_ B T D"], stashes: Stashes, layers: Layers, embedding: Any
    ) -> tuple[Layers, Any]:
        """Runs B and W together, for a single worker: returns the accumulated gradients (layers, embedding)."""
        data, d_out, chunk = self._data(op), self._d_out(op, gradients), self._chunk(op)
        dx, layers = self.stage.backward(self.weights.layers, self._extras(data), stashes, d_out, layers, chunk)
        return layers, self._embedded(op, data, dx, embedding)

    def _copies(self, op: TickOp) -> HotRowCache | None:
        return self.hot_rows.at(op.iteration, self.weights.embedding.copies)

    def _d_out(self, op: TickOp, gradients: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gradients[op.inbox], self.aux_weight_K[op.iteration]

    def _embedded(self, op: TickOp, data: DeviceBatch, dx: jax.Array, embedding: Any) -> Any:
        """Returns the accumulated gradient of the embedding; an op on the first chunk adds its own."""

        def embed(embedding: EmbeddingWeights) -> EmbeddingWeights:
            weights, copies = {"embedding": [layer_of(self.weights.embedding.shard, 0)]}, self._copies(op)
            with _named(scopes.EMBEDDING, self.spec.gpt.embedding_ranks):
                shard_gradients, copy_gradients = self.spec.gpt.embedding_gradient(
                    weights, data.inputs, copies, dx, self.spec.row_wire_dtype
                )
            shard_gradients = jax.tree.map(lambda leaf: leaf[None], shard_gradients)
            return _add(embedding, EmbeddingWeights(shard_gradients, () if copies is None else copy_gradients))

        return cond_unless_static(self._ends(op).is_first, embed, lambda same: same, embedding)


def _named(scope: str, num_ranks: int) -> AbstractContextManager[None]:
    """Returns a name scope if ranks share a part of the model; otherwise the part has no collectives to identify."""
    return jax.named_scope(scope) if num_ranks > 1 else nullcontext()


def _add(totals: Any, values: Any) -> Any:
    """Adds leaf by leaf, in the totals' dtype."""
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), totals, values)


def _sums_of(sums_K: Sums, iteration: Int[Array, ""], **values: Any) -> Sums:
    """Adds one iteration's values to some fields of a window's sums."""

    def added(total_K: jax.Array, value: jax.Array) -> jax.Array:
        return total_K.at[iteration].add(value.astype(total_K.dtype))

    return sums_K._replace(
        **{name: jax.tree.map(added, getattr(sums_K, name), value) for name, value in values.items()}
    )
