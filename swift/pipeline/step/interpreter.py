"""The tick interpreter: runs the ops in a worker's columns of the tick table and exchanges messages between stages.

A tick has two parts. First, the worker runs its own op: one two-way ``lax.cond`` for each kind of op, around the large
buffers of that kind only, since XLA copies the operands of a multi-way branch. The expert ranks of a worker take the
same branch, so it may contain collectives over ``expert``. Second, the workers exchange messages, outside every branch
that differs between workers. The permutation is chosen by the table's common columns, which are the same on all
devices, so a ``lax.switch`` over ``ppermute`` is safe there; inside an op's branch it would deadlock.

The weights do not change between two updates, so they are invariants of the loop over those ticks, not part of its
carry.

Legend: T ticks, Q rounds of a tick, K iterations of the window, B sequences of this rank, D model dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from swift.mesh.per_rank import WORKER_AXIS
from swift.pipeline import scopes
from swift.pipeline.split_backward.partition import Stashes
from swift.pipeline.state import Layers, StageWeights, put
from swift.pipeline.step.metrics import Sums
from swift.pipeline.step.spec import StepSpec
from swift.pipeline.step.stage import ForwardStage
from swift.pipeline.step.stage_ops import EvaluationOps, StageOps
from swift.pipeline.step.tick_arrays import Columns, Common, TickOp
from swift.schedules.lowering.tick_table import Permutation, TickTable
from swift.schedules.problem import Kind

_ACTIVATIONS, _GRADIENTS = 0, 1
"""Directions of messages: their positions in ``Common`` and in ``Interpreter.permutations``."""


class Carry(NamedTuple):
    """Carry of the loop over ticks."""

    activations: jax.Array  # [slots, B, T, D], the inbox of F
    gradients: jax.Array  # [slots, B, T, D], the inbox of B
    stashes: Stashes  # [slots, layers, ...] each, by kind of block
    sums: Sums  # [K] each
    layers: Layers  # gradients of the stage's weights, summed over micro-batches, at least float32
    embedding: Any  # gradients of the embedding; zeros except in the first stage
    head: Any  # gradients of the head; zeros except in the last stage

    @property
    def totals(self) -> StageWeights:
        """Gradients of all weights."""
        return StageWeights(self.layers, self.embedding, self.head)

    def with_totals(self, totals: StageWeights) -> "Carry":
        """Returns the same carry with other gradients."""
        return self._replace(**totals._asdict())


def empty_carry(
    spec: StepSpec,
    table: TickTable,
    stage: ForwardStage,
    weights: StageWeights,
    message: Float[Array, "B T D"],
    num_iterations: int,
) -> Carry:
    """Returns empty buffers and zero sums.

    Args:
        spec: step spec.
        table: tick table, for the number of slots.
        stage: the stage's blocks, for the shapes of the stashes.
        weights: weights of the stage.
        message: array with the shape and dtype of a message between workers.
        num_iterations: K.
    """

    def buffers(num_slots: int, shapes: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros((max(1, num_slots), *leaf.shape), leaf.dtype), shapes)

    num_slots = table.num_b_stash, table.num_held, table.num_w_stash
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, spec.accumulate_dtype), weights)
    return Carry(
        activations=buffers(table.activations.num_slots, message),
        gradients=buffers(table.gradients.num_slots, message),
        stashes=Stashes(*map(buffers, num_slots, stage.stash_shapes)),
        sums=Sums.zeros(spec, num_iterations),
        **zeros._asdict(),
    )


@dataclass(frozen=True)
class Interpreter:
    """Runs a tick table on one rank.

    Attributes:
        permutations: permutations of activations and of gradients; static.
        common: columns of the table that are the same for all workers.
        columns: this worker's columns.
        message: zeros ``[B, T, D]``, sent when there is no message.
        sends_itself: whether a worker may hold two consecutive chunks, whose messages stay on it.
    """

    permutations: tuple[tuple[Permutation, ...], tuple[Permutation, ...]]
    common: Common
    columns: Columns
    message: jax.Array
    sends_itself: bool

    def run(self, ops: StageOps, first: Any, end: Any, carry: Carry) -> Carry:
        """Runs the ticks from ``first`` up to, not including, ``end``; no weight changes between them."""
        return lax.fori_loop(first, end, lambda tick, carry: self._tick(ops, tick, carry), carry)

    def evaluate(self, ops: EvaluationOps, end: Any, carry: Carry) -> Sums:
        """Runs only F, in all ticks before ``end``, without a backward pass."""

        def tick(tick: jax.Array, loop: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
            activations, sums = loop
            op = TickOp.at(self.columns, tick)
            with jax.named_scope(scopes.FORWARD):
                y, sums = lax.cond(
                    op.opcode == Kind.F + 1,
                    lambda sums: ops.evaluate(op, activations, sums),
                    lambda sums: (self.message, sums),
                    sums,
                )
            activations = self._keep(Kind.F, op, y, activations)
            return self._deliver(_ACTIVATIONS, y, tick, op.activation_slot_Q, activations), sums

        return lax.fori_loop(0, end, tick, (carry.activations, carry.sums))[1]

    def _tick(self, ops: StageOps, tick: jax.Array, c: Carry) -> Carry:
        op, silence = TickOp.at(self.columns, tick), self.message
        with jax.named_scope(scopes.FORWARD):
            y, (gradients, stashes, sums, head) = lax.cond(
                op.opcode == Kind.F + 1,
                lambda *buffers: ops.forward(op, c.activations, *buffers),
                lambda *buffers: (silence, buffers),
                *(c.gradients, c.stashes._replace(for_w=()), c.sums, c.head),
            )
        with jax.named_scope(scopes.BACKWARD_INPUT):
            dx, (for_w, embedding) = lax.cond(
                op.opcode == Kind.B + 1,
                lambda for_w, embedding: ops.backward_input(op, gradients, stashes._replace(for_w=for_w), embedding),
                lambda *buffers: (silence, buffers),
                *(c.stashes.for_w, c.embedding),
            )
            stashes = stashes._replace(for_w=for_w)
        with jax.named_scope(scopes.BACKWARD_WEIGHT):
            layers = lax.cond(
                op.opcode == Kind.W + 1,
                lambda layers: ops.backward_weight(op, stashes, layers),
                lambda layers: layers,
                c.layers,
            )
        activations, gradients = self._keep(Kind.F, op, y, c.activations), self._keep(Kind.B, op, dx, gradients)
        activations = self._deliver(_ACTIVATIONS, y, tick, op.activation_slot_Q, activations)
        gradients = self._deliver(_GRADIENTS, dx, tick, op.gradient_slot_Q, gradients)
        return Carry(activations, gradients, stashes, sums, layers, embedding, head)

    def _keep(self, kind: Kind, op: TickOp, message: jax.Array, inbox: jax.Array) -> jax.Array:
        """Puts an op's output into the inbox if this worker itself is the receiver."""
        if not self.sends_itself:
            return inbox
        is_own = (op.opcode == kind + 1) & (op.own_slot >= 0)
        return lax.cond(is_own, partial(put, slot=op.own_slot, values=message), lambda same: same, inbox)

    def _deliver(
        self, direction: int, message: jax.Array, tick: jax.Array, slot_Q: jax.Array, inbox: jax.Array
    ) -> jax.Array:
        """Sends the messages of one direction; returns the inbox with the messages that this worker received."""
        chosen_TQ = self.common[direction]
        ways: list[Callable[[jax.Array], jax.Array]] = [lambda message: message]
        ways += [partial(lax.ppermute, axis_name=WORKER_AXIS, perm=pairs) for pairs in self.permutations[direction]]
        for round_index in range(chosen_TQ.shape[1]):
            with jax.named_scope(f"{(scopes.ACTIVATIONS, scopes.GRADIENTS)[direction]}/{scopes.ROUND}{round_index}"):
                received = lax.switch(chosen_TQ[tick, round_index] + 1, ways, message)
            keep = partial(put, slot=slot_Q[round_index], values=received)
            inbox = lax.cond(slot_Q[round_index] >= 0, keep, lambda same: same, inbox)
        return inbox
