"""F, B and W of one micro-batch on buffers: read the inbox or a stash, compute, write a stash or accumulate.

Only the first and the last stage differ: the first stage's F embeds its tokens and its B turns the input's gradient
into the embedding's; the last stage's F computes the loss, its gradient and the head's gradient at once, so that logits
are never stored.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from swift.models import Weights
from swift.pipeline.runtime.stage import DeviceBatch, Extras, Sums, layers_of
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.runtime.tick_arrays import TickOp
from swift.pipeline.runtime.update import EmbeddingAndHead
from swift.pipeline.split_backward import SplitStage

Stash = tuple[jax.Array, ...]


@dataclass(frozen=True)
class StageOps:
    """The ops of one rank's stage. Made while a step function is traced: it holds that trace's arrays.

    Attributes:
        spec: step spec.
        split: the stage as F, B and W.
        weights: weights of the stage, embedding and head.
        placement_LNS: int32, the expert in every slot.
        ends: whether the worker serves the first and the last stage.
        batch: the worker's micro-batches, ``[n, B, T]``.
        aux_weight_K: weight of the auxiliary loss in each iteration, beside the sum of the tokens' losses.
    """

    spec: StepSpec
    split: SplitStage
    weights: Weights
    placement_LNS: jax.Array
    ends: EmbeddingAndHead
    batch: DeviceBatch
    aux_weight_K: jax.Array

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
        (y, aux), load, for_b, for_w = self.split.forward(
            layers_of(self.weights), self._extras(data), self._input(op, data, activations)
        )
        own = sums_of(sums, op.iteration, aux=aux, load=load)

        def end(gradients: jax.Array, sums: Sums, head: Any) -> tuple[jax.Array, Sums, Any]:
            loss = lambda head, y: self.spec.gpt.head_loss({"head": head}, y, data.labels, data.valid)  # noqa: E731
            value, (d_head, dy) = jax.value_and_grad(loss, argnums=(0, 1))(self.weights["head"], y)
            tokens = data.valid.sum(dtype=jnp.int32)
            sums = sums_of(sums, op.iteration, loss=value, tokens=tokens)
            return put(gradients, op.loss, dy), sums, add(head, d_head)

        gradients, own, head = lax.cond(self.ends.is_last, end, lambda *same: same, gradients, own, head)
        return y, (gradients, put(b_stash, op.b_stash, for_b), put(held, op.held, for_w), own, head)

    def evaluate(
        self, op: TickOp, activations: Float[Array, "_ B T D"], sums: Sums
    ) -> tuple[Float[Array, "B T D"], Sums]:
        """F without a backward pass: the message to the next stage, and the sums."""
        data, gpt = self._data(op), self.spec.gpt
        (y, aux), load, *_ = self.split.forward(
            layers_of(self.weights), self._extras(data), self._input(op, data, activations)
        )

        def end(sums: Sums) -> Sums:
            loss = gpt.head_loss(self.weights, y, data.labels, data.valid)
            return sums_of(sums, op.iteration, loss=loss, tokens=data.valid.sum(dtype=jnp.int32))

        sums = sums_of(sums, op.iteration, aux=aux, load=load)
        return y, lax.cond(self.ends.is_last, end, lambda same: same, sums)

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
        d_out = gradients[op.inbox], self.aux_weight_K[op.iteration]
        dx, for_w = self.split.backward_input(
            layers_of(self.weights), self._extras(data), take(b_stash, op.b_stash), take(held, op.held), d_out
        )

        def embed(embedding: Any) -> Any:
            look_up = lambda weights: self.spec.gpt.embed({"embedding": weights}, data.inputs)  # noqa: E731
            _, pull_back = jax.vjp(look_up, self.weights["embedding"])
            return add(embedding, pull_back(dx)[0])

        embedding = lax.cond(self.ends.is_first, embed, lambda same: same, embedding)
        return dx, (put(w_stash, op.w_stash, for_w), embedding)

    def backward_weight(self, op: TickOp, held: Stash, w_stash: Stash, layers: Weights) -> Weights:
        """W: the accumulated gradients of the stage's weights."""
        return add(
            layers,
            self.split.backward_weight(
                layers_of(self.weights), self._extras(self._data(op)), take(held, op.held), take(w_stash, op.w_stash)
            ),
        )

    def _data(self, op: TickOp) -> DeviceBatch:
        return jax.tree.map(lambda leaf: leaf[op.data], self.batch)

    def _extras(self, data: DeviceBatch) -> Extras:
        return Extras(self.placement_LNS, data.valid)

    def _input(self, op: TickOp, data: DeviceBatch, activations: jax.Array) -> jax.Array:
        gpt = self.spec.gpt
        return lax.cond(self.ends.is_first, lambda: gpt.embed(self.weights, data.inputs), lambda: activations[op.inbox])


def put(buffers: Any, slot: Int[Array, ""], values: Any) -> Any:
    """Writes values to one slot of buffers ``[slots, ...]``."""
    return jax.tree.map(lambda buffer, value: lax.dynamic_update_index_in_dim(buffer, value, slot, 0), buffers, values)


def take(buffers: Any, slot: Int[Array, ""]) -> Any:
    """The values in one slot of buffers ``[slots, ...]``."""
    return jax.tree.map(lambda buffer: buffer[slot], buffers)


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
