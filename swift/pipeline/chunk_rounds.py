"""Sums over the workers that hold the same chunk, where workers hold several: in rounds, one chunk of a worker in each.

C chunks, H holdings, R mesh rows, T rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from swift.mesh.peer_reduce import PeerSum, Unequal
from swift.pipeline import scopes
from swift.pipeline.stacks import Index

NONE = -1
"""No chunk."""
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Rounds:
    """The chunks in rounds, such that no worker has two chunks in a round.

    Attributes:
        chunk_HT: chunk of each holding in each round, int32; ``NONE`` where it has none.
        round_C: round of each chunk, int32.
        sums: sum over the workers that hold the same chunk, of each round.
    """

    chunk_HT: np.ndarray
    round_C: np.ndarray
    sums: tuple[PeerSum, ...]

    @classmethod
    def of(cls, peers_C: Sequence[Sequence[int]], holds_HC: np.ndarray, unequal: Unequal) -> "Rounds":
        """Puts every chunk into the first round in which its workers have no other.

        Args:
            peers_C: mesh rows whose workers hold each chunk.
            holds_HC: whether each holding holds each chunk.
            unequal: see ``PeerSum``.
        """
        rounds: list[list[int]] = []
        for chunk, rows in enumerate(peers_C):
            free = (mine for mine in rounds if all(set(rows).isdisjoint(peers_C[other]) for other in mine))
            mine = next(free, None)
            if mine is None:
                mine = []
                rounds.append(mine)
            mine.append(chunk)
        round_C = np.zeros(len(peers_C), np.int32)
        chunk_HT = np.full((len(holds_HC), len(rounds)), NONE, np.int32)
        for turn, chunks in enumerate(rounds):
            round_C[chunks] = turn
            for chunk in chunks:
                chunk_HT[holds_HC[:, chunk], turn] = chunk
        num_live = 1 + max(row for rows in peers_C for row in rows)
        groups = [[tuple(peers_C[chunk]) for chunk in chunks] for chunks in rounds]
        return cls(chunk_HT, round_C, tuple(PeerSum(_covering(mine, num_live), unequal) for mine in groups))

    def sum_of(self, chunk: Index) -> "PeerSum | SumInRound":
        """The sum over the workers that hold a chunk, which is data."""
        return self.sums[0] if len(self.sums) == 1 else SumInRound(self.sums, jnp.asarray(self.round_C)[chunk])


@dataclass(frozen=True)
class SumInRound:
    """The sum of one of several rounds, each in a branch: the workers that hold the same chunk take the same one."""

    sums: tuple[PeerSum, ...]
    turn: Index
    is_tree = False

    def __call__(self, tree: Tree) -> Tree:
        """Sums the arrays in ``tree`` over the workers of this one's group."""
        for turn, peer_sum in enumerate(self.sums):
            with jax.named_scope(f"{scopes.ROUND}{turn}"):
                tree = lax.cond(self.turn == turn, peer_sum, lambda same: same, tree)
        return tree


def _covering(groups: Sequence[tuple[int, ...]], num_live: int) -> tuple[tuple[int, ...], ...]:
    """The groups, and all other mesh rows alone."""
    others = set(range(num_live)).difference(*groups)
    return *groups, *((row,) for row in sorted(others))
