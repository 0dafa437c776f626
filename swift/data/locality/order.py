"""The order of windows between random and by domain, as COMM-RAND orders the vertices of a graph by community.

The windows of a stretch of batches change places with each other: a share of them, drawn at
random, comes by domain, and the others stay where they are.
"""

import functools
from collections.abc import Callable

import numpy as np

STRETCH_BATCHES = 64
"""Batches among which windows change places."""
_ENDLESS = 2**62


def arranged(domains_N: np.ndarray, locality: float, random: np.random.Generator) -> np.ndarray:
    """Arranges the windows of a stretch: for each place the window that comes there, int64[N].

    The windows of a domain keep their order.

    Args:
        domains_N: int64, domain of each window.
        locality: expected share of the windows that come by domain, in a random order of the domains.
        random: random numbers of the stretch.
    """
    ranks_N = random.permutation(int(domains_N.max(initial=0)) + 1)[domains_N]
    local = np.flatnonzero(random.random(len(domains_N)) < locality)
    ranks_after_N = ranks_N.copy()
    ranks_after_N[local] = np.sort(ranks_N[local])
    order_N = np.empty(len(domains_N), np.int64)
    order_N[np.argsort(ranks_after_N, kind="stable")] = np.argsort(ranks_N, kind="stable")
    return order_N


class LocalOrder:
    """Windows by place, without end: a function of the arguments and the place alone.

    Args:
        windows: function of places, int64[N], that returns the windows there without locality, int64[2, N]: the source
            of each, and its number there.
        domains: function of windows, int64[2, N], that returns the domain of each, int64[N].
        locality: see ``arranged``.
        sequences_per_batch: windows of a batch.
        epoch: windows of an epoch, which no stretch exceeds; 0: the windows have none.
        seed: seed of the stretches.
    """

    def __init__(
        self,
        windows: Callable[[np.ndarray], np.ndarray],
        domains: Callable[[np.ndarray], np.ndarray],
        *,
        locality: float,
        sequences_per_batch: int,
        epoch: int,
        seed: int,
    ):
        self._windows, self._domains, self._locality, self._seed = windows, domains, locality, seed
        self._epoch, self._length = epoch or _ENDLESS, STRETCH_BATCHES * sequences_per_batch
        self._arrange = functools.lru_cache(maxsize=2)(self._arranged)  # the present stretch, and the next

    def window(self, place: int) -> tuple[int, int]:
        """Returns the source of the window at a place, and its number there."""
        epoch, inside = divmod(place, self._epoch)
        number, inside = divmod(inside, self._length)
        source, window = self._arrange(epoch, number)[:, inside].tolist()
        return source, window

    def _arranged(self, epoch: int, number: int) -> np.ndarray:
        first, end = number * self._length, min((number + 1) * self._length, self._epoch)
        begin = epoch * self._epoch
        windows_2N = self._windows(np.arange(begin + first, begin + end))
        random = np.random.default_rng((self._seed, epoch, number))
        return windows_2N[:, arranged(self._domains(windows_2N), self._locality, random)]
