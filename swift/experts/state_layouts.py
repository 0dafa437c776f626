"""Where the master weights and moments of a group of parameters live, and how they reach the slots.

Three layouts behind one interface. ``Decoupled`` is Swift's own and SYMI's: state never moves, weights go anywhere.
The other two are the baselines' ``coupled`` layout, where state is tied to the places that hold the weights:
``ReplicaShards`` for a placement that never changes (DeepSpeed with ZeRO-1), ``Instances`` for one that does (FlexMoE).

Legend: L layer rows, N ranks, S slots of a rank, E classes, W parameters of a class, w = W / N padded.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from swift.experts.exchange import collect, from_slices, materialize, padded_size, to_slices
from swift.mesh import EXPERT_AXIS


class Layout(Protocol):
    """How one group's state is shared by the expert ranks; ``placement_LNS`` is always that of the whole group."""

    def init(self, params_LEW: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """Whole classes -> the master weights of all ranks, ``[L, N, ...]``."""

    def classes(self, master: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """The inverse of ``init``: the master weights of all ranks -> whole classes ``[L, E, W]``."""

    def collect(self, gradients_LSW: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """This rank's slot gradients -> gradients of its master weights, summed over replicas."""

    def square_norm(self, gradients: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """This rank's part of the squared norm of the classes' gradients."""

    def migrate(self, state: Any, old_LNS: jax.Array, new_LNS: jax.Array) -> Any:
        """Moves this rank's master weights and moments, a tree of such arrays, from one placement to the next."""

    def materialize(self, master: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """This rank's master weights -> the weights of its slots ``[L, S, W or more]``, in the compute type."""


@dataclass(frozen=True)
class Decoupled:
    """Each rank holds 1/N of every class for ever (SYMI, section 3). Dense groups are one class with a slot per rank.

    Attributes:
        num_classes: E.
        size: W.
        num_ranks: N.
        compute_dtype: type of the slots, and of weights on the wire.
        wire_dtype: type of gradients on the wire.
    """

    num_classes: int
    size: int
    num_ranks: int
    compute_dtype: DTypeLike
    wire_dtype: DTypeLike

    def init(self, params_LEW: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout; ``[L, N, E, w]``."""
        del placement_LNS
        return to_slices(params_LEW, self.num_ranks)

    def classes(self, master: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout."""
        del placement_LNS
        return from_slices(master, self.size)

    def collect(self, gradients_LSW: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout; ``[L, E, w]``."""
        padding = padded_size(self.size, self.num_ranks) - gradients_LSW.shape[-1]
        padded = jnp.pad(gradients_LSW, ((0, 0), (0, 0), (0, padding)))
        return collect(padded, placement_LNS, self.num_classes, self.wire_dtype)

    def square_norm(self, gradients: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout."""
        del placement_LNS
        return jnp.sum(jnp.square(gradients))

    def migrate(self, state: Any, old_LNS: jax.Array, new_LNS: jax.Array) -> Any:
        """See Layout: nothing moves."""
        del old_LNS, new_LNS
        return state

    def materialize(self, master: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout."""
        return materialize(master.astype(self.compute_dtype), placement_LNS)


@dataclass(frozen=True)
class ReplicaShards:
    """The replicas of a class share its state, 1/r each; the placement is round-robin and never changes.

    This is DeepSpeed's expert parallelism with ZeRO-1: ranks E/S apart hold the same classes, and a group of such
    ranks reduce-scatters gradients (summed on the wire, so always in the gradients' own type) and gathers weights.
    """

    num_classes: int
    size: int
    num_ranks: int
    slots_per_rank: int
    compute_dtype: DTypeLike

    @property
    def stride(self) -> int:
        """Ranks that hold all classes once: DeepSpeed's expert-parallel size."""
        return self.num_classes // self.slots_per_rank

    @property
    def num_replicas(self) -> int:
        """Replicas of a class."""
        return self.num_ranks // self.stride

    @property
    def _groups(self) -> list[list[int]]:
        return [list(range(first, self.num_ranks, self.stride)) for first in range(self.stride)]

    def init(self, params_LEW: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout; ``[L, N, S, W/r]``."""
        slots_LNSW = jax.vmap(lambda params, placement: params[placement])(params_LEW, placement_LNS)
        padding = padded_size(self.size, self.num_replicas) - self.size
        padded = jnp.pad(slots_LNSW, ((0, 0), (0, 0), (0, 0), (0, padding)))
        shards = padded.reshape(*padded.shape[:3], self.num_replicas, -1)
        replica_N = np.arange(self.num_ranks) // self.stride
        return shards[:, np.arange(self.num_ranks), :, replica_N].swapaxes(0, 1)

    def classes(self, master: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout."""
        del placement_LNS
        num_layers = master.shape[0]
        grid = master.reshape(num_layers, self.num_replicas, self.stride, self.slots_per_rank, -1)
        return grid.transpose(0, 2, 3, 1, 4).reshape(num_layers, self.num_classes, -1)[..., : self.size]

    def collect(self, gradients_LSW: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout; ``[L, S, W/r]``."""
        del placement_LNS
        padding = padded_size(self.size, self.num_replicas) - gradients_LSW.shape[-1]
        padded = jnp.pad(gradients_LSW, ((0, 0), (0, 0), (0, padding)))
        return lax.psum_scatter(padded, EXPERT_AXIS, scatter_dimension=2, axis_index_groups=self._groups, tiled=True)

    def square_norm(self, gradients: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout."""
        del placement_LNS
        return jnp.sum(jnp.square(gradients))

    def migrate(self, state: Any, old_LNS: jax.Array, new_LNS: jax.Array) -> Any:
        """See Layout: the placement is the same for ever."""
        del old_LNS, new_LNS
        return state

    def materialize(self, master: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout."""
        del placement_LNS
        weights = master.astype(self.compute_dtype)
        return lax.all_gather(weights, EXPERT_AXIS, axis=2, axis_index_groups=self._groups, tiled=True)


@dataclass(frozen=True)
class Instances:
    """Every slot has master weights and moments of its own (FlexMoE): replicas all-reduce gradients and update alike.

    When the placement changes, a slot that gets another class receives weights and moments from a slot that had it;
    iterations without a change skip that under a condition that is the same on all ranks.
    """

    num_classes: int
    size: int
    num_ranks: int
    compute_dtype: DTypeLike
    wire_dtype: DTypeLike

    def init(self, params_LEW: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout; ``[L, N, S, W]``."""
        return jax.vmap(lambda params, placement: params[placement])(params_LEW, placement_LNS)

    def classes(self, master: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout."""

        def one_layer(slots_NSW: jax.Array, placement_NS: jax.Array) -> jax.Array:
            is_class_EX = jnp.arange(self.num_classes)[:, None] == placement_NS.reshape(1, -1)
            return slots_NSW.reshape(-1, self.size)[jnp.argmax(is_class_EX, axis=1)]

        return jax.vmap(one_layer)(master, placement_LNS)

    def collect(self, gradients_LSW: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout; ``[L, S, W]``."""
        padding = padded_size(self.size, self.num_ranks) - self.size
        padded = jnp.pad(gradients_LSW, ((0, 0), (0, 0), (0, padding)))
        slices = collect(padded, placement_LNS, self.num_classes, self.wire_dtype)
        reduced = materialize(slices.astype(self.wire_dtype), placement_LNS)
        return reduced[..., : self.size].astype(gradients_LSW.dtype)

    def square_norm(self, gradients: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout: a class counts once, whatever the number of its replicas."""
        mine_LS = jnp.take(placement_LNS, lax.axis_index(EXPERT_AXIS), axis=1)
        replicas_LS = jnp.sum(mine_LS[:, :, None, None] == placement_LNS[:, None], axis=(2, 3))
        return jnp.sum(jnp.sum(jnp.square(gradients), axis=-1) / replicas_LS.astype(gradients.dtype))

    def migrate(self, state: Any, old_LNS: jax.Array, new_LNS: jax.Array) -> Any:
        """See Layout: one broadcast of weights and moments for every slot that changes."""
        changed = (old_LNS != new_LNS).reshape(-1)
        moves = jnp.nonzero(changed, size=changed.size, fill_value=0)[0]
        me = lax.axis_index(EXPERT_AXIS)

        def move(i: jax.Array, moved: Any) -> Any:
            layer, rank, slot = jnp.unravel_index(moves[i], old_LNS.shape)
            source = jnp.argmax(old_LNS[layer].reshape(-1) == new_LNS[layer, rank, slot])
            source_rank, source_slot = jnp.unravel_index(source, old_LNS.shape[1:])

            def leaf(before: jax.Array, after: jax.Array) -> jax.Array:
                mine = before[layer, source_slot]
                sent = lax.psum(jnp.where(me == source_rank, mine, jnp.zeros_like(mine)), EXPERT_AXIS)
                return after.at[layer, slot].set(jnp.where(me == rank, sent, after[layer, slot]))

            return jax.tree.map(leaf, state, moved)

        def move_all(state: Any) -> Any:
            return lax.fori_loop(0, changed.sum(), move, state)

        return lax.cond(changed.any(), move_all, lambda state: state, state)

    def materialize(self, master: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        """See Layout: the weights are where they are needed already."""
        del placement_LNS
        return master.astype(self.compute_dtype)
