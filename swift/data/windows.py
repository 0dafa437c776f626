"""Windows of T + 1 tokens cut from a token stream, and their order in training.

The sources of a mixture alternate as in ``grain.MapDataset.mix``, computed here for many places at once.
``DataConfig.locality`` selects an order between random and grouped by domain, as COMM-RAND does for a graph's vertices
and communities: within a stretch of batches, a random subset of the windows is sorted by domain, and the others stay
where they are.

Shapes: M micro-batches, B sequences per micro-batch, T positions, N places of the order, D domains.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import grain
import numpy as np
from grain.experimental import index_shuffle

from swift.data.config import DataConfig, Mixture
from swift.data.stream import SequentialStream, TokenStream
from swift.errors import SettingError

STRETCH_BATCHES = 64
"""Number of batches within which windows may change places."""
_ENDLESS = 2**62

_LEAST_SHARE = 100
"""Integer to which the smallest weight is scaled; the others are scaled in proportion, rounded down (as in Grain)."""
_MOST_SQUARED = 2**31
"""Bound on the sum of integer weights; below it, products of two numbers fit into int64."""

_SHUFFLE_ROUNDS = 4
"""Number of rounds that ``grain.MapDataset.shuffle`` uses."""
_CHUNK = 1024
"""Number of places whose windows are computed together, which is faster than one at a time."""


def order_by_domain(domains_N: np.ndarray, locality: float, random: np.random.Generator) -> np.ndarray:
    """Orders the windows of a stretch: returns the window at each place, int64[N].

    The windows of a domain keep their relative order.

    Args:
        domains_N: int64, domain of each window.
        locality: expected share of the windows that are grouped by domain, with the domains in random order.
        random: random generator of the stretch.
    """
    ranks_N = random.permutation(int(domains_N.max(initial=0)) + 1)[domains_N]
    local = np.flatnonzero(random.random(len(domains_N)) < locality)
    ranks_after_N = ranks_N.copy()
    ranks_after_N[local] = np.sort(ranks_N[local])
    # Both sorts are stable, so the places of a domain receive its windows in their original order.
    order_N = np.empty(len(domains_N), np.int64)
    order_N[np.argsort(ranks_after_N, kind="stable")] = np.argsort(ranks_N, kind="stable")
    return order_N


class DomainOrder:
    """The endless training order with locality; the window at a place depends only on the arguments and the place.

    Args:
        windows: takes places, int64[N], and returns the windows there in the order without locality, int64[2, N]: the
            source of each window, and its number in the source.
        domains: takes windows, int64[2, N], and returns their domains, int64[N].
        locality: see ``order_by_domain``.
        sequences_per_batch: number of windows in a batch.
        epoch: number of windows in an epoch; no stretch crosses the end of an epoch. 0 for no epochs, as in a mixture.
        seed: seed of the stretches' random generators.
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
        """Returns the source of the window at a place, and the window's number in that source."""
        epoch, inside = divmod(place, self._epoch)
        number, inside = divmod(inside, self._length)
        source, window = self._arrange(epoch, number)[:, inside].tolist()
        return source, window

    def _arranged(self, epoch: int, number: int) -> np.ndarray:
        first, end = number * self._length, min((number + 1) * self._length, self._epoch)
        begin = epoch * self._epoch
        windows_2N = self._windows(np.arange(begin + first, begin + end))
        random = np.random.default_rng((self._seed, epoch, number))
        return windows_2N[:, order_by_domain(self._domains(windows_2N), self._locality, random)]


def mixture_indices(places_N: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Maps each place of a mixture to a source and to a place within that source, int64[2, N].

    The first source takes its share of all places, spread as evenly as possible; the second takes its share of the
    remaining places, and so on.

    Args:
        places_N: int64, places from 0.
        weights: weight of each source.
    """
    scale = _LEAST_SHARE / min(weights)
    shares = [int(weight * scale) for weight in weights]
    remaining = sum(shares)
    index_2N = np.zeros((2, len(places_N)), np.int64)
    open_N = np.arange(len(places_N))
    rest_N = places_N if remaining < _MOST_SQUARED else places_N.astype(object)
    for source, share in enumerate(shares):
        after_N, after_next_N = (_left_over(one_N, share, remaining) for one_N in (rest_N, rest_N + 1))
        is_taken_N = after_N == after_next_N
        index_2N[0, open_N[is_taken_N]] = source
        index_2N[1, open_N[is_taken_N]] = (rest_N - after_N)[is_taken_N]
        open_N, rest_N, remaining = open_N[~is_taken_N], after_N[~is_taken_N], remaining - share
    return index_2N


def _left_over(num_N: np.ndarray, share: int, total: int) -> np.ndarray:
    """Returns how many of the first ``num_N`` places remain after a source has taken the part ``share`` / ``total``."""
    # Split by quotient and remainder, so that no product of ``num_N`` overflows.
    return num_N // total * (total - share) + num_N % total * (total - share) // total


class Batch(NamedTuple):
    """Sequences with their labels; a micro-batch lacks the first dimension, a single window the first two."""

    inputs: np.ndarray  # int32[M, B, T], 0 where not valid
    labels: np.ndarray  # int32[M, B, T], the token after each input, 0 where not valid
    valid: np.ndarray  # bool[M, B, T], False for padding, which neither loss nor metrics count
    keys: np.ndarray | None = None  # uint32[M, B, 2], random key of each sequence; None if nothing is drawn
    # float32[M, B, T], weight of each label's loss, 0 where not valid; None if all are 1. A token of weight 0 is routed
    # and counted, but nothing is learned from its label.
    weights: np.ndarray | None = None

    def map(self, function: Callable[[np.ndarray], Any]) -> "Batch":
        """Applies a function to each array."""
        return Batch(*(leaf if leaf is None else function(leaf) for leaf in self))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a token stream, by number: a random-access source for Grain.

    Window i reads tokens i*T to (i+1)*T inclusive, so every token but the stream's first is a label exactly once. The
    last window that holds a label may be padded at its end.

    Args:
        stream: stream of the tokens.
        sequence_length: T, positions of a window.
        num_windows: number of windows; those past the end of the stream are padding only.
        weighs: whether windows have weights; those of a stream without weights are 1.
    """

    stream: TokenStream | SequentialStream
    sequence_length: int
    num_windows: int
    weighs: bool = False

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> Batch:
        start = index * self.sequence_length
        tokens = self.stream.read(start, start + self.sequence_length + 1)
        num_labels = max(0, len(tokens) - 1)
        inputs_T, labels_T = np.zeros((2, self.sequence_length), np.int32)
        inputs_T[:num_labels], labels_T[:num_labels] = tokens[:num_labels], tokens[1:]
        batch = Batch(inputs_T, labels_T, np.arange(self.sequence_length) < num_labels)
        if not self.weighs:
            return batch
        assert isinstance(self.stream, TokenStream), "a stream without random access has no weights"
        weights_T = np.zeros(self.sequence_length, np.float32)
        weights_T[:num_labels] = self.stream.read_weights(start + 1, start + 1 + num_labels)
        return batch._replace(weights=weights_T)


@dataclass(frozen=True, eq=False)
class JoinedWindows:
    """The windows of several streams, one stream after the other, by number.

    Args:
        parts: windows of each stream.
        num_windows: number of windows; those past the end of the last stream are padding only.
    """

    parts: Sequence[Windows]
    num_windows: int

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> Batch:
        for part in self.parts[:-1]:
            if index < len(part):
                return part[index]
            index -= len(part)
        return self.parts[-1][index]


def count_windows(num_tokens: int, sequence_length: int) -> int:
    """Counts the windows of ``sequence_length`` in a stream, including a partial last one."""
    return -(-(num_tokens - 1) // sequence_length)


def training_order(
    config: DataConfig, parts: Sequence[Windows], seed: int, sequences_per_batch: int
) -> grain.MapDataset:
    """Returns an endless dataset of training windows; each source is reshuffled for every pass over it.

    Args:
        config: data settings; only a mixture's weights and the locality are used.
        parts: windows of each source.
        seed: seed of the order.
        sequences_per_batch: number of windows in a batch.

    Raises:
        SettingError: ``DataConfig.locality`` is set, but there is only one domain.
    """
    sizes, seeds = list(map(len, parts)), [_spread_seed(seed, place) for place in range(len(parts))]

    def shuffled(places_N: np.ndarray) -> np.ndarray:
        """Returns the windows at places, as ``shuffle`` and ``mix`` of ``grain.MapDataset`` would order them."""
        sources_N, inside_N = np.zeros_like(places_N), places_N
        if isinstance(config.source, Mixture):
            sources_N, inside_N = mixture_indices(places_N, config.source.weights)
        sizes_N = np.array(sizes)[sources_N]
        epochs_N, inside_N = np.divmod(inside_N, sizes_N)
        spreads_N = (np.array(seeds)[sources_N] + epochs_N) % 2**32
        arguments = (one_N.tolist() for one_N in (inside_N, sizes_N - 1, spreads_N))
        numbers = map(index_shuffle, *arguments, itertools.repeat(_SHUFFLE_ROUNDS))
        return np.stack([sources_N, np.fromiter(numbers, np.int64, len(places_N))])

    order = _in_chunks(shuffled)
    if config.locality:
        parts, domains = _by_domain(config, parts)
        order = DomainOrder(
            shuffled,
            domains,
            locality=config.locality,
            sequences_per_batch=sequences_per_batch,
            epoch=0 if isinstance(config.source, Mixture) else sizes[0],
            seed=_spread_seed(seed),
        ).window

    def read(place: int) -> Batch:
        source, number = order(place)
        return parts[source][number]

    return grain.MapDataset.range(sys.maxsize).map(read)


def _in_chunks(windows: Callable[[np.ndarray], np.ndarray]) -> Callable[[int], tuple[int, int]]:
    """Turns a function of many places, int64[N] -> int64[2, N], into a cached one for a single place."""

    @functools.lru_cache(maxsize=2)
    def chunk(number: int) -> np.ndarray:
        return windows(np.arange(number * _CHUNK, (number + 1) * _CHUNK))

    def window(place: int) -> tuple[int, int]:
        number, inside = divmod(place, _CHUNK)
        source, index = chunk(number)[:, inside].tolist()
        return source, index

    return window


def _by_domain(
    config: DataConfig, parts: Sequence[Windows]
) -> tuple[Sequence[Windows], Callable[[np.ndarray], np.ndarray]]:
    """Regroups the windows by domain; returns them, and a function that returns the domains of windows."""
    if isinstance(config.source, Mixture):
        ends_D, num_domains = None, len(parts)
    else:
        (part,) = parts
        assert isinstance(part.stream, TokenStream)
        stream, ends_D = part.stream.by_domain()
        parts, num_domains = [replace(part, stream=stream)], len(ends_D)
    if num_domains < 2:
        allowed = "must be 0 where all documents are of one domain: see DataConfig.domain, or use a mixture"
        raise SettingError("DataConfig.locality", config.locality, allowed)
    length = parts[0].sequence_length

    def domains(windows_2N: np.ndarray) -> np.ndarray:
        """Returns the domain in which each window begins."""
        sources_N, numbers_N = windows_2N
        return sources_N if ends_D is None else np.searchsorted(ends_D, numbers_N * length, side="right")

    return parts, domains


def _spread_seed(seed: int, source: int = 0) -> int:
    # Grain shuffles epoch e with seed + e: unspread, epoch 1 of seed 0 would be epoch 0 of seed 1.
    return int(np.random.SeedSequence(seed).generate_state(source + 1)[source])
