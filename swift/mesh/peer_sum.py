"""Sums over the peers of a stage, inside a per-rank function.

After a failure, stages may have different numbers of peers. XLA:CPU sums over such unequal groups in one collective.
For compilers that reject unequal groups, permutations along a tree compute the same sum.

Legend: R rows of the axis ``worker``.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from swift.mesh.per_rank import WORKER_AXIS

Unequal = Literal["grouped", "tree"]
_Pairs = tuple[tuple[int, int], ...]
"""Messages of one ``ppermute``, (from row, to row)."""


def reduction_for_unequal_groups(platform: str) -> Unequal:
    """Chooses a platform's method for sums over groups of unequal sizes.

    Args:
        platform: platform name, as in ``jax.Device.platform``.

    Returns:
        ``grouped`` if one collective supports such groups; otherwise ``tree``, which works everywhere. XLA:GPU compiles
        an isolated sum over unequal groups but rejects it within the branches of a pipeline ("replica id not seen in
        replica groups"); XLA:TPU always rejects it.
    """
    return "grouped" if platform == "cpu" else "tree"


@dataclass(frozen=True)
class PeerAllReduce:
    """Sums a tree of arrays over the rows that serve the same stage, rank by rank: ``peer_sum(tree)``.

    The result is bit-identical on all peers. Only sums are supported: a mean over unequal groups, or ``psum(1)`` as
    their size, would silently use the size of the first group. To count peers, sum an array of ones.

    Attributes:
        groups: rows that serve each stage; each row of the axis ``worker`` is in exactly one group.
        unequal: method for groups of unequal sizes, see ``reduction_for_unequal_groups``.
    """

    groups: tuple[tuple[int, ...], ...]
    unequal: Unequal

    def __post_init__(self) -> None:
        rows = sorted(row for group in self.groups for row in group)
        assert rows == list(range(len(rows))), f"groups {self.groups} do not cover the axis"

    @property
    def is_tree(self) -> bool:
        """Whether rows outside a group take part in its sum.

        If so, the sum must not be in a branch that some rows do not take, or it would deadlock. If not, it may be in a
        branch of a ``lax.cond`` whose predicate is the same for all rows of a group.
        """
        return self.unequal == "tree" and len(set(map(len, self.groups))) > 1

    def __call__(self, tree: Any) -> Any:
        """Sums the arrays in ``tree`` over this row's peers."""
        if max(map(len, self.groups)) == 1:
            return tree
        add = self._along_tree if self.is_tree else self._grouped
        # psum multiplies a constant by the size of the first group; a copy is traced like any array and costs nothing.
        return jax.tree.map(lambda leaf: add(jnp.copy(leaf)), tree)

    def _grouped(self, leaf: jax.Array) -> jax.Array:
        return lax.psum(leaf, WORKER_AXIS, axis_index_groups=self.groups)

    def _along_tree(self, leaf: jax.Array) -> jax.Array:
        row, num_live = lax.axis_index(WORKER_AXIS), sum(map(len, self.groups))
        levels = tree_levels(self.groups)
        for pairs in levels:
            leaf = leaf + lax.ppermute(leaf, WORKER_AXIS, pairs)  # zeros where nothing arrives
        for pairs in reversed(levels):
            arrives_R = np.zeros(num_live, bool)
            arrives_R[[upper for upper, _ in pairs]] = True
            total = lax.ppermute(leaf, WORKER_AXIS, tuple((lower, upper) for upper, lower in pairs))
            leaf = jnp.where(jnp.asarray(arrives_R)[row], total, leaf)
        return leaf


def tree_levels(groups: tuple[tuple[int, ...], ...]) -> tuple[_Pairs, ...]:
    """Returns the messages on each level of the trees, which sum to a group's first row; reversed, they spread the sum.

    Members of a group that are 1, then 2, then 4, ... apart are added, in all groups at once. The number of levels is
    the base-2 logarithm of the largest group's size, rounded up.

    >>> tree_levels(((0, 3, 5), (1, 4), (2,)))
    (((3, 0), (4, 1)), ((5, 0),))
    """
    num_levels = (max(map(len, groups)) - 1).bit_length()
    return tuple(
        tuple(
            (group[lower + distance], group[lower])
            for group in groups
            for lower in range(0, len(group) - distance, 2 * distance)
        )
        for distance in (2**number for number in range(num_levels))
    )
