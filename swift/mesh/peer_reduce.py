"""Sums over the peers of a stage, inside a per-rank function.

Stages may have unequally many peers, once a worker has failed. CPU and GPU sum over such groups in one collective; the
TPU's compiler refuses them, and there the same sum is made of permutations.

R: rows of the axis ``worker``.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from swift.mesh.live import WORKER_AXIS

Unequal = Literal["grouped", "rounds"]
Pairs = tuple[tuple[int, int], ...]
"""Messages of one ``ppermute``, (from row, to row)."""


def how_unequal(platform: str) -> Unequal:
    """How a platform sums over groups of unequal sizes.

    Args:
        platform: as ``jax.Device.platform`` says it.

    Returns:
        ``grouped`` where one collective takes such groups, and ``rounds``, which work everywhere, otherwise. XLA:GPU
        lowers a lone sum over unequal groups, and refuses it within the branches of a pipeline ("replica id not seen
        in replica groups"); XLA:TPU refuses it anywhere.
    """
    return "grouped" if platform == "cpu" else "rounds"


@dataclass(frozen=True)
class PeerSum:
    """Sums a tree of arrays over the rows that serve the same stage, rank by rank: ``peer_sum(tree)``.

    The result is the same on all peers, bit for bit. It only sums: a mean over unequal groups, and ``psum(1)`` as their
    size, would divide by the size of the first group, without a word. Sum an array of ones to count peers.

    Attributes:
        groups: for every stage the rows that serve it; each row of the axis ``worker`` is in one of them.
        unequal: what is done when groups are of unequal sizes, see ``how_unequal``.
    """

    groups: tuple[tuple[int, ...], ...]
    unequal: Unequal

    def __post_init__(self) -> None:
        rows = sorted(row for group in self.groups for row in group)
        assert rows == list(range(len(rows))), f"groups {self.groups} do not cover the axis"

    @property
    def in_rounds(self) -> bool:
        """Whether rows outside a group have to take part in its sum.

        Then it must not stand in a branch that some rows do not take: it would deadlock. Otherwise it may stand in a
        branch of a ``lax.cond`` whose predicate is the same for all rows of a group.
        """
        return self.unequal == "rounds" and len(set(map(len, self.groups))) > 1

    def __call__(self, tree: Any) -> Any:
        """The sums over this row's peers of the arrays of numbers in ``tree``."""
        if max(map(len, self.groups)) == 1:
            return tree
        add = self._rounds if self.in_rounds else self._grouped
        # psum multiplies a constant by the size of the first group; a copy is traced as any array, and costs nothing.
        return jax.tree.map(lambda leaf: add(jnp.copy(leaf)), tree)

    def _grouped(self, leaf: jax.Array) -> jax.Array:
        return lax.psum(leaf, WORKER_AXIS, axis_index_groups=self.groups)

    def _rounds(self, leaf: jax.Array) -> jax.Array:
        row, num_rows = lax.axis_index(WORKER_AXIS), sum(map(len, self.groups))
        rounds = tree_rounds(self.groups)
        for pairs in rounds:
            leaf = leaf + lax.ppermute(leaf, WORKER_AXIS, pairs)  # zeros where nothing arrives
        for pairs in reversed(rounds):
            arrives_R = np.zeros(num_rows, bool)
            arrives_R[[upper for upper, _ in pairs]] = True
            total = lax.ppermute(leaf, WORKER_AXIS, tuple((lower, upper) for upper, lower in pairs))
            leaf = jnp.where(jnp.asarray(arrives_R)[row], total, leaf)
        return leaf


def tree_rounds(groups: tuple[tuple[int, ...], ...]) -> tuple[Pairs, ...]:
    """The rounds of messages after which the first row of every group has its sum; back, in reverse order, all have it.

    Members of a group that are 1, then 2, then 4, ... apart are added, in all groups at once: as many rounds as the
    largest group needs, the logarithm of its size.

    >>> tree_rounds(((0, 3, 5), (1, 4), (2,)))
    (((3, 0), (4, 1)), ((5, 0),))
    """
    num_rounds = (max(map(len, groups)) - 1).bit_length()
    return tuple(
        tuple(
            (group[lower + distance], group[lower])
            for group in groups
            for lower in range(0, len(group) - distance, 2 * distance)
        )
        for distance in (2**number for number in range(num_rounds))
    )
