"""Layouts of optimizer state: where a group's master weights and moments live, and how weights reach the slots.

All layouts share one interface. ``Decoupled`` is the layout of Swift and of SYMI: state never moves, and weights can be
sent to any slot. ``FetchedPerMicrobatch`` is the same layout for exact capacity, in which weights follow the routing of
each micro-batch. The other two are the baselines' ``coupled`` layouts, in which state is tied to the slots that hold
the weights: ``ReplicaShards`` for a placement that never changes (DeepSpeed with ZeRO-1), ``Instances`` for one that
does (FlexMoE).

Legend: L layers, N ranks, S slots of a rank, E experts, W parameters of an expert, w = W / N padded.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.experts.weight_exchange import collect, fetch, from_slices, materialize, padded_size, to_slices
from swift.mesh.per_rank import EXPERT_AXIS


class Layout(Protocol):
    """Layout of a parameter group's optimizer state over the expert ranks.

    ``placement_LNS`` always covers all ranks.
    """

    def init(
        self, params_LEW: Float[Array, "L E W"], placement_LNS: Int[Array, "L N S"]
    ) -> Float[Array | np.ndarray, "L N ..."]:
        """Converts whole experts to the master weights of all ranks, ``[L, N, ...]``."""

    def classes(
        self, master: Float[Array | np.ndarray, "L ..."], placement_LNS: Int[Array, "L N S"]
    ) -> Float[np.ndarray, "L E W"]:
        """Joins all ranks' master weights on the host into whole experts ``[L, E, W]``; the inverse of ``init``."""

    def collect(
        self, gradients_LSW: Float[Array, "L S W"], placement_LNS: Int[Array, "L N S"]
    ) -> Float[Array, "L ..."]:
        """Reduces slot gradients to the gradients of this rank's master weights, summed over replicas."""

    def first_position(self, width: int) -> Int[Array, ""] | int:
        """Offset of this rank's slice in an expert's parameter vector, for slices with ``width`` parameters."""

    def square_norm(self, gradients: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, ""]:
        """Computes this rank's term in the squared norm of the experts' gradients."""

    def migrate(self, state: Any, old_LNS: Int[Array, "L N S"], new_LNS: Int[Array, "L N S"]) -> Any:
        """Moves this rank's master weights and moments, a tree of arrays, from the old placement to the new one."""

    def materialize(self, master: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "L S W"]:
        """Gathers this rank's slot weights ``[L, S, W or more]`` from the master weights, in the compute dtype."""


class _StationaryState:
    """Base class of layouts whose state never moves and whose every number is on exactly one rank."""

    def square_norm(self, gradients: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, ""]:
        """See Layout."""
        del placement_LNS
        return jnp.sum(jnp.square(gradients))

    def migrate(self, state: Any, old_LNS: Int[Array, "L N S"], new_LNS: Int[Array, "L N S"]) -> Any:
        """See Layout: nothing moves."""
        del old_LNS, new_LNS
        return state


@dataclass(frozen=True)
class Decoupled(_StationaryState):
    """Layout in which each rank always holds the same 1/N of every expert (SYMI, section 3).

    A dense group is treated as one expert with a slot on every rank.

    Attributes:
        num_classes: number of experts, E.
        size: parameters of an expert, W.
        num_ranks: number of expert ranks, N.
        compute_dtype: dtype of the slots, and of weights on the wire.
        wire_dtype: dtype of gradients on the wire.
    """

    num_classes: int
    size: int
    num_ranks: int
    compute_dtype: DTypeLike
    wire_dtype: DTypeLike

    def init(
        self, params_LEW: Float[Array | np.ndarray, "L E W"], placement_LNS: Any
    ) -> Float[Array | np.ndarray, "L N ..."]:
        """See Layout; ``[L, N, E, w]``, on the host if the parameters are."""
        del placement_LNS
        return to_slices(params_LEW, self.num_ranks)

    def classes(self, master: Float[Array | np.ndarray, "L ..."], placement_LNS: Any) -> Float[np.ndarray, "L E W"]:
        """See Layout."""
        del placement_LNS
        return from_slices(np.asarray(master), self.size)

    def first_position(self, width: int) -> Int[Array, ""]:
        """See Layout."""
        return lax.axis_index(EXPERT_AXIS) * width

    def collect(
        self, gradients_LSW: Float[Array, "L S W"], placement_LNS: Int[Array, "L N S"]
    ) -> Float[Array, "L ..."]:
        """See Layout; ``[L, E, w]``."""
        padding = padded_size(self.size, self.num_ranks) - gradients_LSW.shape[-1]
        padded = jnp.pad(gradients_LSW, ((0, 0), (0, 0), (0, padding)))
        return collect(padded, placement_LNS, self.num_classes, self.wire_dtype)

    def materialize(self, master: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "L S W"]:
        """See Layout."""
        return materialize(master.astype(self.compute_dtype), placement_LNS)


@dataclass(frozen=True)
class FetchedPerMicrobatch(Decoupled):
    """State as in ``Decoupled``, for exact capacity: each layer fetches its slots' weights in every micro-batch.

    Instead of slots, a step holds the slices ``[L, E, w]`` in the compute dtype and accumulates their gradients.
    Weights and gradients are exchanged by ``fetch`` and its gradient, once per micro-batch.
    """

    def collect(
        self, gradients_LSW: Float[Array, "L E w"], placement_LNS: Int[Array, "L N S"]
    ) -> Float[Array, "L ..."]:
        """See Layout: returns the gradients, which the backward pass of ``fetch`` has already summed."""
        del placement_LNS
        return gradients_LSW

    def materialize(self, master: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "L E w"]:
        """See Layout: returns the slices in the compute dtype."""
        del placement_LNS
        return master.astype(self.compute_dtype)

    def fetch(self, slices_Ew: Float[Array, "E w"], placement_NS: Int[Array, "N S"]) -> Float[Array, "S W"]:
        """Fetches the weights ``[S, W or more]`` of this rank's slots in one layer; differentiable."""
        return fetch(slices_Ew, placement_NS, self.wire_dtype)


@dataclass(frozen=True)
class ReplicaShards(_StationaryState):
    """Layout in which an expert's r replicas each hold 1/r of its state; the placement never changes.

    This is DeepSpeed's expert parallelism with ZeRO-1. The placement is round-robin, so ranks E/S apart hold the same
    experts. Such a group of ranks reduce-scatters gradients (summed on the wire, and therefore always in their own
    dtype) and all-gathers weights.
    """

    num_classes: int
    size: int
    num_ranks: int
    slots_per_rank: int
    compute_dtype: DTypeLike

    @property
    def stride(self) -> int:
        """Number of ranks that together hold each expert once: DeepSpeed's expert-parallel size."""
        return self.num_classes // self.slots_per_rank

    @property
    def num_replicas(self) -> int:
        """Number of replicas per expert, r."""
        return self.num_ranks // self.stride

    @property
    def _groups(self) -> list[list[int]]:
        return [list(range(first, self.num_ranks, self.stride)) for first in range(self.stride)]

    def init(self, params_LEW: Float[Array, "L E W"], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "L N ..."]:
        """See Layout; ``[L, N, S, W/r]``."""
        slots_LNSW = jax.vmap(lambda params, placement: params[placement])(params_LEW, placement_LNS)
        padding = padded_size(self.size, self.num_replicas) - self.size
        padded = jnp.pad(slots_LNSW, ((0, 0), (0, 0), (0, 0), (0, padding)))
        shards = padded.reshape(*padded.shape[:3], self.num_replicas, -1)
        replica_N = np.arange(self.num_ranks) // self.stride
        return shards[:, np.arange(self.num_ranks), :, replica_N].swapaxes(0, 1)

    def classes(
        self, master: Float[Array | np.ndarray, "L ..."], placement_LNS: Int[Array, "L N S"]
    ) -> Float[np.ndarray, "L E W"]:
        """See Layout."""
        del placement_LNS
        num_layers = master.shape[0]
        grid = np.asarray(master).reshape(num_layers, self.num_replicas, self.stride, self.slots_per_rank, -1)
        return grid.transpose(0, 2, 3, 1, 4).reshape(num_layers, self.num_classes, -1)[..., : self.size]

    def first_position(self, width: int) -> Int[Array, ""]:
        """See Layout."""
        return lax.axis_index(EXPERT_AXIS) // self.stride * width

    def collect(
        self, gradients_LSW: Float[Array, "L S W"], placement_LNS: Int[Array, "L N S"]
    ) -> Float[Array, "L ..."]:
        """See Layout; ``[L, S, W/r]``."""
        del placement_LNS
        padding = padded_size(self.size, self.num_replicas) - gradients_LSW.shape[-1]
        padded = jnp.pad(gradients_LSW, ((0, 0), (0, 0), (0, padding)))
        return lax.psum_scatter(padded, EXPERT_AXIS, scatter_dimension=2, axis_index_groups=self._groups, tiled=True)

    def materialize(self, master: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "L S W"]:
        """See Layout."""
        del placement_LNS
        weights = master.astype(self.compute_dtype)
        return lax.all_gather(weights, EXPERT_AXIS, axis=2, axis_index_groups=self._groups, tiled=True)


@dataclass(frozen=True)
class Instances:
    """Layout in which every slot has its own master weights and moments (FlexMoE).

    The replicas of an expert all-reduce their gradients and compute the same update. When the placement changes, a slot
    that gets another expert receives weights and moments from a slot that held this expert. Iterations without a change
    skip the transfer, by a condition that is the same on all ranks.
    """

    num_classes: int
    size: int
    num_ranks: int
    compute_dtype: DTypeLike
    wire_dtype: DTypeLike

    def init(self, params_LEW: Float[Array, "L E W"], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "L N ..."]:
        """See Layout; ``[L, N, S, W]``."""
        return jax.vmap(lambda params, placement: params[placement])(params_LEW, placement_LNS)

    def classes(
        self, master: Float[Array | np.ndarray, "L ..."], placement_LNS: Int[Array, "L N S"]
    ) -> Float[np.ndarray, "L E W"]:
        """See Layout: returns the first replica of each expert, since all replicas are equal."""
        num_layers = len(master)
        is_class_LEX = np.arange(self.num_classes)[:, None] == np.asarray(placement_LNS).reshape(num_layers, 1, -1)
        slots_LXW = np.asarray(master).reshape(num_layers, -1, self.size)
        return slots_LXW[np.arange(num_layers)[:, None], is_class_LEX.argmax(axis=2)]

    def first_position(self, width: int) -> int:
        """See Layout: 0, since every rank has whole experts."""
        del width
        return 0

    def collect(
        self, gradients_LSW: Float[Array, "L S W"], placement_LNS: Int[Array, "L N S"]
    ) -> Float[Array, "L ..."]:
        """See Layout; ``[L, S, W]``."""
        padding = padded_size(self.size, self.num_ranks) - self.size
        padded = jnp.pad(gradients_LSW, ((0, 0), (0, 0), (0, padding)))
        slices = collect(padded, placement_LNS, self.num_classes, self.wire_dtype)
        reduced = materialize(slices.astype(self.wire_dtype), placement_LNS)
        return reduced[..., : self.size].astype(gradients_LSW.dtype)

    def square_norm(self, gradients: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, ""]:
        """See Layout: counts each expert once, however many replicas it has."""
        mine_LS = jnp.take(placement_LNS, lax.axis_index(EXPERT_AXIS), axis=1)
        replicas_LS = jnp.sum(mine_LS[:, :, None, None] == placement_LNS[:, None], axis=(2, 3))
        return jnp.sum(jnp.sum(jnp.square(gradients), axis=-1) / replicas_LS.astype(gradients.dtype))

    def migrate(self, state: Any, old_LNS: Int[Array, "L N S"], new_LNS: Int[Array, "L N S"]) -> Any:
        """See Layout: broadcasts weights and moments once for every slot that changes."""
        # All ranks know both placements, so they run the same moves in the same order, as collectives require.
        changed = (old_LNS != new_LNS).reshape(-1)
        moves = jnp.nonzero(changed, size=changed.size, fill_value=0)[0]
        me = lax.axis_index(EXPERT_AXIS)

        def move(i: jax.Array, moved: Any) -> Any:
            layer, rank, slot = jnp.unravel_index(moves[i], old_LNS.shape)
            source = jnp.argmax(old_LNS[layer].reshape(-1) == new_LNS[layer, rank, slot])
            source_rank, source_slot = jnp.unravel_index(source, old_LNS.shape[1:])

            def leaf(before: jax.Array, after: jax.Array) -> jax.Array:
                local_state = before[layer, source_slot]
                sent = lax.psum(jnp.where(me == source_rank, local_state, jnp.zeros_like(local_state)), EXPERT_AXIS)
                return after.at[layer, slot].set(jnp.where(me == rank, sent, after[layer, slot]))

            return jax.tree.map(leaf, state, moved)

        def move_all(state: Any) -> Any:
            return lax.fori_loop(0, changed.sum(), move, state)

        return lax.cond(changed.any(), move_all, lambda state: state, state)

    def materialize(self, master: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "L S W"]:
        """See Layout: only casts, because the weights are already in their slots."""
        del placement_LNS
        return master.astype(self.compute_dtype)
