"""Messages between workers as a few permutations, and the slots of inboxes and stashes.

T: ticks, Q: rounds of a tick, R: live workers (rows of the mesh axis ``worker``), e: messages of a direction,
i: intervals.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

Permutation = tuple[tuple[int, int], ...]
"""(sending row, receiving row) pairs as ``jax.lax.ppermute`` takes them; rows may be missing."""

NONE = -1
_RARE = 0.02
"""Share of the ticks below which what is sent in them gets no permutation of its own if another round helps."""


@dataclass(frozen=True, eq=False)
class Moves:
    """How the messages of one direction move, tick by tick.

    Attributes:
        permutations: the distinct ones. A worker also sends where it has nothing to say; its reader has no slot for it.
        permutation_TQ: int32, the one that a round uses; ``NONE``: the round has no collective.
        slot_TQR: int32, the inbox slot into which a worker receives; ``NONE``: what comes is no message.
        num_slots: of the inbox of every worker.
    """

    permutations: tuple[Permutation, ...]
    permutation_TQ: np.ndarray
    slot_TQR: np.ndarray
    num_slots: int

    @property
    def num_rounds_T(self) -> np.ndarray:
        """int64[T]: the rounds of every tick that run a collective."""
        return (self.permutation_TQ != NONE).sum(axis=1)


def move(
    tick_e: np.ndarray, sender_e: np.ndarray, receiver_e: np.ndarray, slot_e: np.ndarray, num_ticks: int, num_rows: int
) -> Moves:
    """Brings messages into rounds, in which nobody receives twice, and the rounds into a few permutations.

    A tick needs as many rounds as the most messages that one worker receives in it; nobody sends two, since a worker
    runs one op in a tick. Ticks in which the same workers send to the same are treated alike. Those that need one round
    leave no choice and come first, the most frequent ahead; rare ones get a round more where that saves a permutation.

    Args:
        tick_e: at whose end a message moves.
        sender_e, receiver_e: rows.
        slot_e: of the receiver's inbox.
        num_ticks: T.
        num_rows: R.
    """
    by_tick = np.lexsort((sender_e, receiver_e, tick_e))
    in_tick = np.split(by_tick, np.cumsum(np.bincount(tick_e, minlength=num_ticks))[:-1])
    alike: dict[bytes, list[int]] = defaultdict(list)
    for tick in np.unique(tick_e).tolist():
        alike[np.stack([sender_e[in_tick[tick]], receiver_e[in_tick[tick]]]).tobytes()].append(tick)
    first = {ticks[0]: ticks for ticks in alike.values()}
    needed = {tick: int(np.bincount(receiver_e[in_tick[tick]]).max()) for tick in first}
    palette, rounds = _Palette(num_rows), {}
    for tick in sorted(first, key=lambda tick: (needed[tick], -len(first[tick]), -len(in_tick[tick]))):
        is_rare = len(first[tick]) < _RARE * num_ticks
        messages = in_tick[tick]
        rounds[tick] = palette.cover(sender_e[messages], receiver_e[messages], needed[tick] + is_rare)
    num_rounds = max(map(len, rounds.values()), default=0)
    permutation_TQ = np.full((num_ticks, num_rounds), NONE, np.int32)
    slot_TQR = np.full((num_ticks, num_rounds, num_rows), NONE, np.int32)
    for tick, ticks in first.items():
        for turn, (permutation, chosen) in enumerate(rounds[tick]):
            permutation_TQ[ticks, turn] = permutation
            for same in ticks:
                messages = in_tick[same][chosen]
                slot_TQR[same, turn, receiver_e[messages]] = slot_e[messages]
    return Moves(palette.permutations(), permutation_TQ, slot_TQR, int(slot_e.max(initial=-1)) + 1)


class _Palette:
    """The permutations so far; each may still grow by pairs of rows that it leaves out. c: permutations."""

    def __init__(self, num_rows: int):
        self.receiver_cR = np.full((0, num_rows), NONE, np.int32)
        self.sender_cR = np.full((0, num_rows), NONE, np.int32)

    def cover(self, sender_e: np.ndarray, receiver_e: np.ndarray, most_rounds: int) -> list[tuple[int, np.ndarray]]:
        """The rounds that carry the messages of a tick: the permutation of each, and the messages.

        Args:
            sender_e: each row once.
            receiver_e: ascending.
            most_rounds: at least what is needed.
        """
        rounds: list[tuple[int, np.ndarray]] = []
        left = np.arange(len(sender_e))
        while len(left):
            permutation, chosen = self.choose(sender_e[left], receiver_e[left], most_rounds - len(rounds))
            rounds.append((permutation, left[chosen]))
            left = np.delete(left, chosen)
        return rounds

    def choose(self, sender_e: np.ndarray, receiver_e: np.ndarray, rounds_left: int) -> tuple[int, np.ndarray]:
        """The permutation that carries most of the messages in one round, and which; it grows by them.

        Every worker that is to receive as many as there are rounds left has to be among the receivers; if no
        permutation can do that, there is a new one.
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
        """As pairs of rows."""
        return tuple(
            tuple((sender, receiver) for sender, receiver in enumerate(row) if receiver != NONE)
            for row in self.receiver_cR.tolist()
        )


def interval_slots(row_i: np.ndarray, start_i: np.ndarray, end_i: np.ndarray, num_rows: int) -> np.ndarray:
    """The slot that each interval occupies on its row: as few slots as there are intervals at once.

    Args:
        row_i: on which row.
        start_i, end_i: ticks; a slot given back in a tick can be taken in the same.
        num_rows: R.

    Returns:
        int32[i], from 0.
    """
    slot_i = np.full(len(row_i), NONE, np.int32)
    free = np.zeros((num_rows, int(np.bincount(row_i, minlength=1).max())), np.int32)
    num_free, num_used = np.zeros((2, num_rows), np.int32)
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
    """The intervals in groups, in each of which every row is there once."""
    turn = _occurrence(row_i[intervals])
    return [intervals[turn == t] for t in range(int(turn.max(initial=-1)) + 1)]


def _occurrence(keys: np.ndarray) -> np.ndarray:
    """How many times a key has been there before."""
    order = np.argsort(keys, kind="stable")
    first = np.searchsorted(keys[order], keys[order])
    turn = np.empty(len(keys), np.int64)
    turn[order] = np.arange(len(keys)) - first
    return turn
