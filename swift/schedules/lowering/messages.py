"""Messages between workers as a few permutations, and the slots of inboxes and stashes.

T: ticks, Q: rounds of a tick, R: live workers (rows of the mesh axis ``worker``), e: messages of a direction,
i: intervals.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

Permutation = tuple[tuple[int, int], ...]
"""(sending row, receiving row) pairs, as ``jax.lax.ppermute`` takes them; some rows may not occur."""

NONE = -1
_RARE = 0.02
"""Share of the ticks below which a message pattern gets no permutation of its own if another round helps."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Messages of one direction, tick by tick.

    Attributes:
        permutations: distinct permutations. A worker also sends when it has no message; its reader then has no slot.
        permutation_TQ: int32, permutation of a round; ``NONE`` for a round without a collective.
        slot_TQR: int32, inbox slot into which a worker receives; ``NONE`` if it receives no message.
        num_slots: slots of every worker's inbox.
    """

    permutations: tuple[Permutation, ...]
    permutation_TQ: np.ndarray
    slot_TQR: np.ndarray
    num_slots: int

    @property
    def num_rounds_T(self) -> np.ndarray:
        """Number of rounds that run a collective in every tick, int64[T]."""
        return (self.permutation_TQ != NONE).sum(axis=1)


def move(
    tick_e: np.ndarray, sender_e: np.ndarray, receiver_e: np.ndarray, slot_e: np.ndarray, num_ticks: int, num_live: int
) -> Moves:
    """Groups messages into rounds, in which no worker receives twice, and covers the rounds by a few permutations.

    A tick needs as many rounds as the most messages that one worker receives in it; no worker sends two, since it runs
    one op per tick. Ticks with the same senders and receivers share their rounds. Patterns that need one round leave no
    choice and come first, the most frequent ahead; rare ones get one more round where that saves a permutation.

    Args:
        tick_e: tick at whose end each message moves.
        sender_e, receiver_e: rows.
        slot_e: slot in the receiver's inbox.
        num_ticks: number of ticks, T.
        num_live: number of live workers, R.
    """
    by_tick = np.lexsort((sender_e, receiver_e, tick_e))
    in_tick = np.split(by_tick, np.cumsum(np.bincount(tick_e, minlength=num_ticks))[:-1])
    alike: dict[bytes, list[int]] = defaultdict(list)
    for tick in np.unique(tick_e).tolist():
        alike[np.stack([sender_e[in_tick[tick]], receiver_e[in_tick[tick]]]).tobytes()].append(tick)
    first = {ticks[0]: ticks for ticks in alike.values()}
    needed = {tick: int(np.bincount(receiver_e[in_tick[tick]]).max()) for tick in first}
    palette, rounds = _Palette(num_live), {}
    for tick in sorted(first, key=lambda tick: (needed[tick], -len(first[tick]), -len(in_tick[tick]))):
        is_rare = len(first[tick]) < _RARE * num_ticks
        messages = in_tick[tick]
        rounds[tick] = palette.cover(sender_e[messages], receiver_e[messages], needed[tick] + is_rare)
    num_rounds = max(map(len, rounds.values()), default=0)
    permutation_TQ = np.full((num_ticks, num_rounds), NONE, np.int32)
    slot_TQR = np.full((num_ticks, num_rounds, num_live), NONE, np.int32)
    for tick, ticks in first.items():
        for turn, (permutation, chosen) in enumerate(rounds[tick]):
            permutation_TQ[ticks, turn] = permutation
            for same in ticks:
                messages = in_tick[same][chosen]
                slot_TQR[same, turn, receiver_e[messages]] = slot_e[messages]
    return Moves(palette.permutations(), permutation_TQ, slot_TQR, int(slot_e.max(initial=-1)) + 1)


class _Palette:
    """Permutations so far; each may still grow by pairs of unused rows. c: permutations."""

    def __init__(self, num_live: int):
        self.receiver_cR = np.full((0, num_live), NONE, np.int32)
        self.sender_cR = np.full((0, num_live), NONE, np.int32)

    def cover(self, sender_e: np.ndarray, receiver_e: np.ndarray, most_rounds: int) -> list[tuple[int, np.ndarray]]:
        """Chooses the rounds that carry the messages of a tick, as (permutation, indices of its messages).

        Args:
            sender_e: sending rows, each once.
            receiver_e: receiving rows, ascending.
            most_rounds: allowed number of rounds, at least as many as needed.
        """
        rounds: list[tuple[int, np.ndarray]] = []
        left = np.arange(len(sender_e))
        while len(left):
            permutation, chosen = self.choose(sender_e[left], receiver_e[left], most_rounds - len(rounds))
            rounds.append((permutation, left[chosen]))
            left = np.delete(left, chosen)
        return rounds

    def choose(self, sender_e: np.ndarray, receiver_e: np.ndarray, rounds_left: int) -> tuple[int, np.ndarray]:
        """Chooses the permutation that carries the most messages in one round, extends it, and returns both.

        Every worker with as many messages left to receive as there are rounds left has to be among the receivers; if no
        permutation allows that, a new one is added.
        """
        there, back = self.receiver_cR[:, sender_e], self.sender_cR[:, receiver_e]
        fits_ce = ((there == NONE) | (there == receiver_e)) & ((back == NONE) | (back == sender_e))
        _, first, count = np.unique(receiver_e, return_index=True, return_counts=True)
        served = np.logical_or.reduceat(fits_ce, first, axis=1)
        score = np.where(served[:, count == rounds_left].all(axis=1), served.sum(axis=1), 0)
        if not score.any():
            new = np.full((1, self.receiver_cR.shape[1]), NONE, np.int32)
            self.receiver_cR, self.sender_cR = np.append(self.receiver_cR, new, 0), np.append(self.sender_cR, new, 0)
            permutation, fitting = len(self.receiver_cR) - 1, np.arange(len(sender_e))
        else:
            permutation = int(np.argmax(score))
            fitting = np.flatnonzero(fits_ce[permutation])
        chosen = fitting[np.unique(receiver_e[fitting], return_index=True)[1]]
        self.receiver_cR[permutation, sender_e[chosen]] = receiver_e[chosen]
        self.sender_cR[permutation, receiver_e[chosen]] = sender_e[chosen]
        return permutation, chosen

    def permutations(self) -> tuple[Permutation, ...]:
        """Returns the permutations as pairs of rows."""
        return tuple(
            tuple((sender, receiver) for sender, receiver in enumerate(row) if receiver != NONE)
            for row in self.receiver_cR.tolist()
        )


def interval_slots(row_i: np.ndarray, start_i: np.ndarray, end_i: np.ndarray, num_live: int) -> np.ndarray:
    """Allocates a slot to each interval on its row, using only as many slots as intervals overlap.

    Args:
        row_i: row of each interval.
        start_i, end_i: first and last tick; a slot freed in a tick can be taken in the same tick.
        num_live: number of live workers, R.

    Returns:
        int32[i], from 0.
    """
    slot_i = np.full(len(row_i), NONE, np.int32)
    free = np.zeros((num_live, int(np.bincount(row_i, minlength=1).max())), np.int32)
    num_free, num_used = np.zeros((2, num_live), np.int32)
    given_back = np.split(np.argsort(end_i, kind="stable"), np.cumsum(np.bincount(end_i, minlength=1)))
    taken = np.argsort(start_i, kind="stable")
    taken_in = np.split(taken, np.cumsum(np.bincount(start_i, minlength=1)))
    for tick, starting in enumerate(taken_in[:-1]):
        for ending in _rows_apart(given_back[tick], row_i) if tick < len(given_back) else ():
            free[row_i[ending], num_free[row_i[ending]]] = slot_i[ending]
            num_free[row_i[ending]] += 1
        for beginning in _rows_apart(starting, row_i):
            rows = row_i[beginning]
            again = num_free[rows] > 0
            slot_i[beginning] = np.where(again, free[rows, num_free[rows] - 1], num_used[rows])
            num_free[rows] -= again
            num_used[rows] += ~again
    return slot_i


def _rows_apart(intervals: np.ndarray, row_i: np.ndarray) -> list[np.ndarray]:
    """Splits intervals into groups in which every row occurs at most once."""
    turn = _occurrence(row_i[intervals])
    return [intervals[turn == t] for t in range(int(turn.max(initial=-1)) + 1)]


def _occurrence(keys: np.ndarray) -> np.ndarray:
    """Counts earlier occurrences of the same key, for each key."""
    order = np.argsort(keys, kind="stable")
    first = np.searchsorted(keys[order], keys[order])
    turn = np.empty(len(keys), np.int64)
    turn[order] = np.arange(len(keys)) - first
    return turn
