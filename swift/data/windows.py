"""Windows of a stream of tokens, batches of them, and their order for training.

Shapes: M micro-batches, B sequences per micro-batch, T positions.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import grain
import numpy as np
from grain.experimental import index_shuffle

from swift.data.config import DataConfig, Mixture
from swift.data.locality.order import LocalOrder
from swift.data.locality.shares import mixed_places
from swift.data.sequential import SequentialStream
from swift.data.stream import TokenStream
from swift.errors import SettingError

_SHUFFLE_ROUNDS = 4
"""Rounds of ``grain.MapDataset.shuffle``."""
_CHUNK = 1024
"""Places whose windows are found together, which takes less time than one by one."""


class Batch(NamedTuple):
    """Sequences with their labels; a micro-batch lacks the first dim, a single window the first two."""

    inputs: np.ndarray  # int32[M, B, T], 0 where not valid
    labels: np.ndarray  # int32[M, B, T], the token after each input, 0 where not valid
    valid: np.ndarray  # bool[M, B, T], False for padding, which counts in nothing


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a stream, by number: a random-access source for Grain.

    Window i reads tokens i*T to (i+1)*T inclusive, so every token but the stream's first is a label once. The last
    window that holds a label may be padded at its end.

    Args:
        stream: tokens.
        sequence_length: T, positions of a window.
        num_windows: number of windows; those past the end of the stream are padding only.
    """

    stream: TokenStream | SequentialStream
    sequence_length: int
    num_windows: int

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> Batch:
        start = index * self.sequence_length
        tokens = self.stream.read(start, start + self.sequence_length + 1)
        num_labels = max(0, len(tokens) - 1)
        inputs_T, labels_T = np.zeros((2, self.sequence_length), np.int32)
        inputs_T[:num_labels], labels_T[:num_labels] = tokens[:num_labels], tokens[1:]
        return Batch(inputs_T, labels_T, np.arange(self.sequence_length) < num_labels)


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
    """Number of windows of ``sequence_length`` labels with at least one label of a stream of ``num_tokens``."""
    return -(-(num_tokens - 1) // sequence_length)


def training_order(
    config: DataConfig, parts: Sequence[Windows], seed: int, sequences_per_batch: int
) -> grain.MapDataset:
    """Returns the windows for training, without end: those of each source shuffled anew in every epoch of it.

    Args:
        config: settings of the data, of which the weights of a mixture and the locality count.
        parts: windows of each source.
        seed: seed of the order.
        sequences_per_batch: windows of a batch.

    Raises:
        SettingError: the windows are to come by domain, and there is one domain only.
    """
    sizes, seeds = list(map(len, parts)), [_spread_seed(seed, place) for place in range(len(parts))]

    def shuffled(places_N: np.ndarray) -> np.ndarray:
        """Returns the windows at places, where ``mix`` and then ``shuffle`` of ``grain.MapDataset`` put them."""
        sources_N, inside_N = np.zeros_like(places_N), places_N
        if isinstance(config.source, Mixture):
            sources_N, inside_N = mixed_places(places_N, config.source.weights)
        sizes_N = np.array(sizes)[sources_N]
        turns_N, inside_N = np.divmod(inside_N, sizes_N)
        spreads_N = (np.array(seeds)[sources_N] + turns_N) % 2**32
        given = (one_N.tolist() for one_N in (inside_N, sizes_N - 1, spreads_N))
        numbers = map(index_shuffle, *given, itertools.repeat(_SHUFFLE_ROUNDS))
        return np.stack([sources_N, np.fromiter(numbers, np.int64, len(places_N))])

    order = _in_chunks(shuffled)
    if config.locality:
        parts, domains = _by_domain(config, parts)
        order = LocalOrder(
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
    """Makes of a function of many places, int64[N], that returns sources and numbers, int64[2, N], one of a place."""

    @functools.lru_cache(maxsize=2)
    def chunk(number: int) -> np.ndarray:
        return windows(np.arange(number * _CHUNK, (number + 1) * _CHUNK))

    def window(place: int) -> tuple[int, int]:
        number, inside = divmod(place, _CHUNK)
        source, found = chunk(number)[:, inside].tolist()
        return source, found

    return window


def _by_domain(
    config: DataConfig, parts: Sequence[Windows]
) -> tuple[Sequence[Windows], Callable[[np.ndarray], np.ndarray]]:
    """Returns the windows with the documents of a domain end to end, and the function of the domains of windows."""
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
        """Finds the domain in which each window begins."""
        sources_N, numbers_N = windows_2N
        return sources_N if ends_D is None else np.searchsorted(ends_D, numbers_N * length, side="right")

    return parts, domains


def _spread_seed(seed: int, source: int = 0) -> int:
    # Grain shuffles epoch e with seed + e: unspread, epoch 1 of seed 0 would be epoch 0 of seed 1.
    return int(np.random.SeedSequence(seed).generate_state(source + 1)[source])
