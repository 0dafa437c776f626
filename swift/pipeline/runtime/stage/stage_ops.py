"""F, B and W of one micro-batch on buffers: read the inbox or a stash, compute, write a stash or accumulate.

Only the first and the last chunk differ: the first one's F embeds its tokens and its B turns the input's gradient
into the embedding's; the last one's F computes the loss, its gradient and the head's gradient at once, so that logits
are never stored.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swift.models.vocabulary.embedding import Copies
from swift.pipeline import scopes
from swift.pipeline.runtime.metrics import Sums
from swift.pipeline.runtime.stage.block import Extras
from swift.pipeline.runtime.stage.forward_stage import ForwardStage
from swift.pipeline.runtime.stage.hot_rows import HotRows
from swift.pipeline.runtime.stage.stage import Stage, Stash
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.runtime.tick_arrays import TickOp
from swift.pipeline.runtime.update import EmbeddingAndHead, where
from swift.pipeline.stacks import Index, layer_of, put
from swift.pipeline.stage_weights import EmbeddingWeights, Layers, StageWeights
from swift.pipeline.train_state import DeviceBatch


@dataclass(frozen=True)
class EvaluationOps:
    """The op of one rank's stage in an evaluation. Made while a step function is traced: it holds that trace's arrays.

    Attributes:
        spec: step spec.
        stage: the stage's blocks.
        weights: weights of the stage, embedding and head.
        placement_LNS: int32, the expert in every slot.
        own_chunk: the chunk that the worker holds; None: it may hold several, and the op says which one it works on.
        batch: the worker's micro-batches, ``[n, B, T]``.
    """

    spec: StepSpec
    stage: ForwardStage
    weights: StageWeights
    placement_LNS: jax.Array
    own_chunk: Index | None
    batch: DeviceBatch

    def evaluate(
        self, op: TickOp, activations: Float[Array, "_ B T D"], sums: Sums
    ) -> tuple[Float[Array, "B T D"], Sums]:
        """F without a backward pass: the message to the next stage, and the sums."""
        data = self._data(op)
        x = self._input(op, data, activations)
        y, aux, load = self.stage.evaluate(self.weights.layers, self._extras(data), x, self._chunk(op))

        def end(sums: Sums) -> Sums:
            loss = self._loss(self.weights.head, y, data)
            return sums_of(sums, op.iteration, loss=loss, tokens=data.valid.sum(dtype=jnp.int32))

        sums = sums_of(sums, op.iteration, aux=aux, load=load)
        return y, where(self._ends(op).is_last, end, lambda same: same, sums)

    def _chunk(self, op: TickOp) -> Index:
        return op.chunk if self.own_chunk is None else self.own_chunk

    def _ends(self, op: TickOp) -> EmbeddingAndHead:
        return EmbeddingAndHead.of(self.spec, self._chunk(op))

    def _embed(self, op: TickOp, data: DeviceBatch) -> jax.Array:
        weights = {"embedding": [layer_of(self.weights.embedding.own, 0)]}
        with _named(scopes.EMBEDDING, self.spec.gpt.embedding_ranks):
            return self.spec.gpt.embed(weights, data.inputs, copies=self._copies(op))

    def _copies(self, op: TickOp) -> Copies | None:
        """Copies that an op looks tokens up in: none in an evaluation."""
        del op
        return None

    def _loss(self, head: Any, y: jax.Array, data: DeviceBatch) -> jax.Array:
        weights = {name: [layer_of(stack, 0)] for name, stack in head.items()}
        with _named(scopes.HEAD, self.spec.gpt.head_ranks):
            return self.spec.gpt.head_loss(weights, y, data.labels, data.valid)

    def _data(self, op: TickOp) -> DeviceBatch:
        return jax.tree.map(lambda leaf: leaf[op.data], self.batch)

    def _extras(self, data: DeviceBatch) -> Extras:
        return Extras.of(self.spec, self.placement_LNS, data)

    def _input(self, op: TickOp, data: DeviceBatch, activations: jax.Array) -> jax.Array:
        return where(self._ends(op).is_first, lambda: self._embed(op, data), lambda: activations[op.inbox])


@dataclass(frozen=True)
class StageOps(EvaluationOps):
    """The ops of one rank's stage in a step.

    Attributes:
        stage: the stage's blocks as F, B and W.
        aux_weight_K: weight of the auxiliary loss in each iteration, beside the sum of the tokens' losses.
        hot_rows: tokens of which the weights have copies.
    """

    stage: Stage
    aux_weight_K: jax.Array
    hot_rows: HotRows

    def forward(
        self,
        op: TickOp,
        activations: Float[Array, "_ B T D"],
        gradients: Float[Array, "_ B T D"],
        b_stash: Stash,
        held: Stash,
        sums: Sums,
        head: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "_ B T D"], Stash, Stash, Sums, Any]]:
        """F: the message to the next stage, and the updated buffers; the last stage adds its loss."""
        data = self._data(op)
        y, aux, load, b_stash, held = self.stage.forward(
            self.weights.layers,
            self._extras(data),
            self._input(op, data, activations),
            b_stash,
            held,
            (op.b_stash, op.held),
            self._chunk(op),
        )
        own = sums_of(sums, op.iteration, aux=aux, load=load)

        def end(gradients: jax.Array, sums: Sums, head: Any) -> tuple[jax.Array, Sums, Any]:
            value, (d_head, dy) = jax.value_and_grad(self._loss, argnums=(0, 1))(self.weights.head, y, data)
            tokens = data.valid.sum(dtype=jnp.int32)
            sums = sums_of(sums, op.iteration, loss=value, tokens=tokens)
            return put(gradients, op.loss, dy), sums, add(head, d_head)

        gradients, own, head = where(self._ends(op).is_last, end, lambda *same: same, gradients, own, head)
        return y, (gradients, b_stash, held, own, head)

    def backward_input(
        self,
        op: TickOp,
        gradients: Float[Array, "_ B T D"],
        b_stash: Stash,
        held: Stash,
        w_stash: Stash,
        embedding: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Stash, Any]]:
        """B: the message to the previous stage, and the buffers with W's stash."""
        data = self._data(op)
        dx, w_stash = self.stage.backward_input(
            self.weights.layers,
            self._extras(data),
            b_stash,
            held,
            w_stash,
            (op.b_stash, op.held, op.w_stash),
            self._d_out(op, gradients),
            self._chunk(op),
        )
        return dx, (w_stash, self._embedded(op, data, dx, embedding))

    def backward_weight(self, op: TickOp, held: Stash, w_stash: Stash, layers: Layers) -> Layers:
        """W: the accumulated gradients of the stage's weights."""
        extras, slots = self._extras(self._data(op)), (op.held, op.w_stash)
        return self.stage.backward_weight(self.weights.layers, extras, held, w_stash, slots, layers, self._chunk(op))

    def backward(
        self,
        op: TickOp,
        gradients: Float[Array, "_ B T D"],
        b_stash: Stash,
        held: Stash,
        layers: Layers,
        embedding: Any,
    ) -> tuple[Layers, Any]:
        """B and W at once, for a single worker: the accumulated gradients of its layers and of the embedding."""
        data = self._data(op)
        dx, layers = self.stage.backward(
            self.weights.layers, self._extras(data), b_stash, held, self._d_out(op, gradients), layers, self._chunk(op)
        )
        return layers, self._embedded(op, data, dx, embedding)

    def _copies(self, op: TickOp) -> Copies | None:
        return self.hot_rows.at(op.iteration, self.weights.embedding.copies)

    def _d_out(self, op: TickOp, gradients: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gradients[op.inbox], self.aux_weight_K[op.iteration]

    def _embedded(self, op: TickOp, data: DeviceBatch, dx: jax.Array, embedding: Any) -> Any:
        """The accumulated gradient of the embedding, if the op is on the first chunk."""

        def embed(embedding: EmbeddingWeights) -> EmbeddingWeights:
            weights, copies = {"embedding": [layer_of(self.weights.embedding.own, 0)]}, self._copies(op)
            with _named(scopes.EMBEDDING, self.spec.gpt.embedding_ranks):
                more, of_copies = self.spec.gpt.embedding_gradient(
                    weights, data.inputs, copies, dx, self.spec.row_wire_dtype
                )
            more = jax.tree.map(lambda leaf: leaf[None], more)
            return add(embedding, EmbeddingWeights(more, () if copies is None else of_copies))

        return where(self._ends(op).is_first, embed, lambda same: same, embedding)


def _named(scope: str, num_ranks: int) -> AbstractContextManager[None]:
    """The context of what ranks share: only then has it collectives, which are told by the name."""
    return jax.named_scope(scope) if num_ranks > 1 else nullcontext()


def add(totals: Any, values: Any) -> Any:
    """Leaf-wise sums, in the totals' dtype."""
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), totals, values)


def sums_of(sums_K: Sums, iteration: Int[Array, ""], **values: Any) -> Sums:
    """Adds values of one iteration to some fields of a window's sums."""

    def added(total_K: jax.Array, value: jax.Array) -> jax.Array:
        return total_K.at[iteration].add(value.astype(total_K.dtype))

    return sums_K._replace(
        **{name: jax.tree.map(added, getattr(sums_K, name), value) for name, value in values.items()}
    )
