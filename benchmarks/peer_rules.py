"""Rules of other systems for the load of a micro-batch, in NumPy: written anew from their published descriptions.

Both know the tokens of each expert exactly, after gating. Experts have a home rank. UltraEP copies experts to ranks
with room; Marin's waterfilling copies none, and drops what a rank has no rows for.
"""

import numpy as np


def home_ranks(num_classes: int, num_ranks: int) -> np.ndarray:
    """The home of each expert, int[E]: neighbours on one rank, as evenly as possible."""
    return np.arange(num_classes) * num_ranks // num_classes


def ultraep(tokens_E: np.ndarray, num_ranks: int, slots_per_rank: int) -> np.ndarray:
    """UltraEP's plan: the tokens of each expert that each rank computes, int[N, E].

    A binary search finds the lowest threshold for which the ranks above it can be relieved: each hands its largest
    experts over, by quotas, to the ranks with the most room that still have a slot for a copy.
    """
    home_E = home_ranks(len(tokens_E), num_ranks)
    spare_N = slots_per_rank - np.bincount(home_E, minlength=num_ranks)
    quota_NE = np.where(np.arange(num_ranks)[:, None] == home_E, tokens_E, 0)
    low, high = -(-int(tokens_E.sum()) // num_ranks), int(quota_NE.sum(axis=1).max())
    while low < high:
        threshold = (low + high) // 2
        plan_NE = _relieve(quota_NE, threshold, spare_N)
        if plan_NE is None:
            low = threshold + 1
        else:
            high, best_NE = threshold, plan_NE
    return quota_NE if high == quota_NE.sum(axis=1).max() else best_NE


def _relieve(quota_NE: np.ndarray, threshold: int, spare_N: np.ndarray) -> np.ndarray | None:
    """Moves what ranks have above the threshold to others; None if slots or room run out."""
    plan_NE, spare_N, load_N = quota_NE.copy(), spare_N.copy(), quota_NE.sum(axis=1)
    for rank in np.argsort(-load_N, kind="stable"):
        for expert in np.argsort(-quota_NE[rank], kind="stable"):
            while load_N[rank] > threshold and plan_NE[rank, expert] > 0:
                # A rank that has a copy of the expert already has had no room left.
                room_N = np.where(spare_N > 0, threshold - load_N, 0)
                target = int(np.argmax(room_N))
                moved = min(room_N[target], load_N[rank] - threshold, plan_NE[rank, expert])
                if moved <= 0:
                    return None
                plan_NE[[rank, target], expert] += [-moved, moved]
                load_N[[rank, target]] += [-moved, moved]
                spare_N[target] -= 1
            if load_N[rank] <= threshold:
                break
    return plan_NE


def waterfilling(tokens_E: np.ndarray, num_ranks: int, rows_per_rank: int) -> np.ndarray:
    """Marin's acceptance: the tokens of each expert that are computed, int[E].

    The experts of a rank share its rows. Each has an even share for certain; what some leave of theirs goes to those
    that have more tokens, one after the other.
    """
    home_E, kept_E = home_ranks(len(tokens_E), num_ranks), np.zeros_like(tokens_E)
    for rank in range(num_ranks):
        own_X = np.flatnonzero(home_E == rank)
        floor_X = np.minimum(tokens_E[own_X], rows_per_rank // max(len(own_X), 1))
        above_X, slack = tokens_E[own_X] - floor_X, rows_per_rank - floor_X.sum()
        before_X = np.cumsum(above_X) - above_X
        kept_E[own_X] = floor_X + np.clip(slack - before_X, 0, above_X)
    return kept_E
