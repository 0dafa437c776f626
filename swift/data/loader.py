"""Training and validation batches by iteration number: windows of a split, shuffled and repeated as by Grain."""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import grain
import numpy as np
from jaxtyping import Bool

from swift.data.config import DataConfig, Mixture, Split
from swift.data.index import corpus_streams
from swift.data.sources import DataError, TokenFile, TokenOutOfRange
from swift.data.stream import SequentialStream, TokenStream
from swift.data.tokenizer import Tokenizer, text_bytes
from swift.data.windows import Batch, JoinedWindows, Windows, count_windows, training_order
from swift.errors import SettingError, check_count

_STATE_VERSION = 2
_READABLE = (1, 2)
"""Versions of states that can be restored; those of version 1 count batches of one size, not sequences."""
_BATCH = ("num_microbatches", "sequences_per_microbatch")
"""Fields of a state whose product is the number of sequences of a batch, which may change when a run resumes."""
_ADDED: dict[str, Any] = {"locality": 0.0}
"""Default values of settings that states saved by older versions lack."""


class SourceBatches(NamedTuple):
    """The batches of a source in a pass over the validation split.

    Attributes:
        name: name of the source; empty if the data are no mixture.
        weight: weight of the source.
        batches: numbers of its batches.
    """

    name: str
    weight: float
    batches: range


class Loader(Iterator[Batch]):
    """An endless iterator over a split's batches; a batch depends only on the arguments and the iteration number.

    Training windows are reshuffled every epoch, and each is seen once per epoch; a batch may span two epochs. If a run
    resumes with batches of another size, these continue with the sequence after the last one seen, see ``restore``.
    Validation windows come in the order of the stream in every pass, and the last batch of a pass is padded, so
    ``num_batches_per_epoch`` batches score every token exactly once.

    Any worker can load any batch or micro-batch at any time; iterating only advances the step. A loader starts no
    threads. A ``StreamSource`` is read sequentially: its most recent batches stay in memory, and going back further
    rereads the stream from its beginning.

    Args:
        config: data settings.
        split: 'train' or 'validation'.
        num_microbatches: M, micro-batches per iteration, summed over all pipelines.
        sequences_per_microbatch: B, sequences per micro-batch.
        sequence_length: T, tokens per sequence.
        seed: seed of the training order.
        corpus: index of the corpus, see ``find_index``; None to read the corpus here.
        num_kept: number of the most recent batches of a ``StreamSource`` to keep in memory.
        draws_keys: whether batches have random keys, which follow from the seed, the iteration, and the number of the
            sequence within it.

    Attributes:
        parts: batches of each source in a pass over the validation split.

    Raises:
        SettingError: the source cannot be read, a split has no document or no full window of T + 1 tokens, or a
            number is out of range.
    """

    def __init__(
        self,
        config: DataConfig,
        split: Split,
        *,
        num_microbatches: int,
        sequences_per_microbatch: int,
        sequence_length: int,
        seed: int,
        corpus: Path | None = None,
        num_kept: int = 1,
        draws_keys: bool = False,
    ):
        check_count("Loader.num_microbatches", num_microbatches, least=1)
        check_count("Loader.sequences_per_microbatch", sequences_per_microbatch, least=1)
        check_count("Loader.sequence_length", sequence_length, least=1)
        check_count("Loader.seed", seed, least=0)
        if split not in get_args(Split):
            raise SettingError("Loader.split", split, f"must be one of {', '.join(get_args(Split))}")
        try:
            streams = corpus_streams(config, split, corpus)
            identity = _identity_of(config, streams)
        except DataError as error:
            name = "validation_source" if config.validation_source is not None and split == "validation" else "source"
            raise SettingError(f"DataConfig.{name}", config.source_of(split), _refusal(error)) from error
        for stream in streams:
            _check_one_window(stream.num_tokens, split, sequence_length)

        self._config, self._seed = config, seed
        self._num_microbatches, self._keys_seed = num_microbatches, seed if draws_keys else None
        counts = [count_windows(stream.num_tokens, sequence_length) for stream in streams]
        self._num_windows = sum(counts)
        num_sequences = self._num_sequences = num_microbatches * sequences_per_microbatch
        self._num_batches_per_epoch = -(-self._num_windows // num_sequences)
        self._sequential = next((stream for stream in streams if isinstance(stream, SequentialStream)), None)
        self._sequence_length, self._is_training = sequence_length, split == "train"
        if self._sequential is not None:  # one more for the label of the last input
            self._sequential.keep(num_kept * num_sequences * sequence_length + 1)
        if not self._is_training:  # the batches of a source have no windows of another one
            num_batches = [-(-count // num_sequences) for count in counts]
            counts = [number * num_sequences for number in num_batches]
            self._num_batches_per_epoch = sum(num_batches)
        weighs, pairs = config.weighs_tokens, zip(streams, counts, strict=True)
        self._parts = [Windows(stream, sequence_length, count, weighs) for stream, count in pairs]
        self._windows, none_T = self._endless(num_sequences), np.zeros(sequence_length, np.int32)
        weights_T = none_T.astype(np.float32) if weighs else None
        self._padding = Batch(none_T, none_T, none_T.astype(bool), weights=weights_T)
        self._next_step = 0
        self._origin = 0, 0  # an iteration, and the number of sequences before it
        self._initial_batch_size = num_sequences
        self._identity: dict[str, Any] = {
            "split": split,
            "num_microbatches": num_microbatches,
            "sequences_per_microbatch": sequences_per_microbatch,
            "sequence_length": sequence_length,
            "seed": seed,
            "locality": float(config.locality) if split == "train" else 0.0,
        } | identity
        self._file = streams[0].file if len(streams) == 1 else None
        ends = list(itertools.accumulate((-(-count // num_sequences) for count in counts), initial=0))
        mixed = config.source if isinstance(config.source, Mixture) else None
        self.parts = tuple(
            SourceBatches("" if mixed is None else label, weight, range(first, end))
            for label, weight, (first, end) in zip(
                [""] if mixed is None else mixed.labels,
                [1.0] if mixed is None else mixed.weights,
                itertools.pairwise(ends),
                strict=True,
            )
        )
        self._text_bytes, self._num_bytes = _text_bytes(config), dict[int, int]()

    def _endless(self, initial_batch_size: int) -> grain.MapDataset:
        """Returns the windows in the order in which batches take them, without an end.

        Args:
            initial_batch_size: sequences of the batches with which the run began, on which an order with locality
                depends.
        """
        if self._sequential is not None:  # the stream is endless and cannot be shuffled
            return grain.MapDataset.source(self._parts[0])
        if self._is_training:
            return training_order(self._config, self._parts, self._seed, initial_batch_size)
        filled = JoinedWindows(self._parts, self._num_batches_per_epoch * self._num_sequences)
        return grain.MapDataset.source(filled).repeat()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: one more than the largest token that a batch may contain."""
        return self._config.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the data, for decoding its tokens."""
        return self._config.tokenizer

    @property
    def num_windows(self) -> int:
        """Number of sequences per epoch, excluding those that are only padding."""
        return self._num_windows

    @property
    def num_batches_per_epoch(self) -> int:
        """Number of batches per epoch, rounded up to hold every window."""
        return self._num_batches_per_epoch

    def batch(self, step: int, is_read: Bool[np.ndarray, "M B"] | None = None) -> Batch:
        """Loads the batch of an iteration: arrays [M, B, T].

        Args:
            step: iteration, from 0.
            is_read: sequences to read; the others are replaced by padding. None to read all.

        Raises:
            DataError: a file has changed or can no longer be read, or holds a token beyond the vocabulary.
        """
        shape = self._num_microbatches, self._num_sequences // self._num_microbatches
        reads_MB = np.ones(shape, bool) if is_read is None else is_read
        first = self._sequences_before(step)
        windows = [self._windows[first + n] if reads else self._padding for n, reads in enumerate(reads_MB.flat)]
        return _stacked(windows, shape)._replace(keys=_sequence_keys(self._keys_seed, step, shape))

    def num_bytes(self, step: int) -> int | None:
        """Counts the bytes of text in the labels of a batch; None if the bytes of a token are unknown.

        Raises:
            DataError: see ``batch``.
        """
        if self._text_bytes is None:
            return None
        if step not in self._num_bytes:  # a run evaluates the same batches again and again
            batch = self.batch(step)
            self._num_bytes[step] = int(self._text_bytes[batch.labels[batch.valid]].sum())
        return self._num_bytes[step]

    def microbatch(self, step: int, index: int) -> Batch:
        """Loads micro-batch ``index`` of ``batch(step)`` without the others: arrays [B, T]."""
        assert 0 <= index < self._num_microbatches
        size = self._num_sequences // self._num_microbatches
        first, shape = self._sequences_before(step) + index * size, (self._num_microbatches, size)
        batch = _stacked([self._windows[first + n] for n in range(size)], (size,))
        keys = _sequence_keys(self._keys_seed, step, shape)
        return batch if keys is None else batch._replace(keys=keys[index])

    def _sequences_before(self, step: int) -> int:
        """Returns how many sequences the iterations before ``step`` have taken."""
        origin, num_sequences = self._origin
        before = num_sequences + (step - origin) * self._num_sequences
        assert before >= 0
        return before

    def skip_to(self, step: int) -> None:
        """Reads a ``StreamSource`` up to an iteration, so that loading that iteration's batch later is fast.

        Does nothing for other sources, which load every batch equally fast.

        Raises:
            DataError: the stream cannot be read.
        """
        if self._sequential is not None:
            self._sequential.skip_to(self._sequences_before(step) * self._sequence_length)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self._next_step)
        self._next_step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Returns the iterator's position and the identity of its data, JSON-serializable."""
        file = None if self._file is None else asdict(self._file)
        return {
            "version": _STATE_VERSION,
            "next_step": self._next_step,
            "next_sequence": self._sequences_before(self._next_step),
            "initial_batch_size": self._initial_batch_size,
            "data": dict(self._identity),
            "file": file,
        }

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Restores a saved position: the next batch begins with the sequence that would have come next.

        Only the number of sequences in a batch may differ: no sequence is skipped or repeated at the change.

        Returns:
            Lines of text: one if batches have another number of sequences, and a warning if a token file has been
            written to since, but has the same length and the same sampled tokens; the rest is not compared.

        Raises:
            SettingError: another version wrote the state, or its data or order differ; the error says which.
        """
        check_same_data(state, self.state())
        step, before, now = int(state["next_step"]), _batch_size(state), self._num_sequences
        self._next_step, self._origin = step, (step, _next_sequence(state))
        initial_batch_size = int(state.get("initial_batch_size", before))
        if initial_batch_size != self._initial_batch_size:
            self._initial_batch_size, self._windows = initial_batch_size, self._endless(initial_batch_size)
        lines = []
        if now != before:
            lines += [
                f"iterations have {now} sequences from {step + 1} on (before: {before}), beginning with the run's "
                f"sequence {self._origin[1] + 1}; the schedule of the learning rate still counts iterations"
            ]
        if self._file is None or state.get("file") in (None, asdict(self._file)):
            return lines
        source = self._config.source_of(self._identity["split"])
        assert isinstance(source, TokenFile)
        return [
            *lines,
            f"{source.path} has been written to since the checkpoint: it has as many tokens, and a "
            "sample of them is the same; the rest was not compared",
        ]


def _text_bytes(config: DataConfig) -> np.ndarray | None:
    """Returns the bytes of text of each token, see ``text_bytes``; None if some token may be of another tokenizer."""
    sizes = text_bytes(config.tokenizer)
    if sizes is None or len(sizes) < config.vocab_size:
        return None
    ends = {part.source.end_of_document for part in config.components if isinstance(part.source, TokenFile)}
    sizes[[token for token in ends if token is not None]] = 0
    return sizes


def _identity_of(config: DataConfig, streams: Sequence[TokenStream | SequentialStream]) -> dict[str, Any]:
    """Returns what a resumed run compares: the length and digests of each source, and a mixture's weights."""
    each = [
        {"num_tokens": stream.num_tokens, "checksum": stream.checksum(), "digest": stream.digest()}
        for stream in streams
    ]
    if not isinstance(config.source, Mixture):
        runs = streams[0].runs if isinstance(streams[0], TokenStream) and config.locality else None
        return each[0] if runs is None else each[0] | {"domains": zlib.crc32(np.stack(runs).tobytes())}
    weights = [float(weight) for weight in config.source.weights]
    return {"num_tokens": sum(stream.num_tokens for stream in streams), "weights": weights, "sources": each}


def _sequence_keys(seed: int | None, step: int, shape: tuple[int, int]) -> np.ndarray | None:
    """Returns the random key of each sequence of an iteration, uint32[M, B, 2]; None without a seed."""
    if seed is None:
        return None
    return np.random.SeedSequence((seed, step)).generate_state(2 * math.prod(shape)).reshape(*shape, 2)


def _stacked(windows: Sequence[Batch], shape: tuple[int, ...]) -> Batch:
    """Stacks windows, without their keys, into arrays [*shape, T]."""
    inputs, labels, valid = (np.stack(leaf) for leaf in zip(*(window[:3] for window in windows), strict=True))
    weights = [window.weights for window in windows if window.weights is not None]
    batch = Batch(inputs, labels, valid, weights=np.stack(weights) if weights else None)
    return batch.map(lambda leaf: leaf.reshape(*shape, -1))


def state_at(state: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns a loader's state moved to just before iteration ``step``, by batches of the loader's size."""
    moved = (step - state["next_step"]) * _batch_size(state)
    return dict(state) | {"next_step": step, "next_sequence": _next_sequence(state) + moved}


def _batch_size(state: Mapping[str, Any]) -> int:
    return math.prod(int(state["data"][name]) for name in _BATCH)


def _next_sequence(state: Mapping[str, Any]) -> int:
    return int(state.get("next_sequence", state["next_step"] * _batch_size(state)))


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises SettingError unless two loader states agree on data and order; the sizes of batches may differ."""
    if saved.get("version") not in _READABLE:
        allowed = f"must be {_STATE_VERSION}: another version of Swift wrote this state"
        raise SettingError("version of the saved data state", saved.get("version"), allowed)
    # States of older versions lack fields that were added since: these take their default, or count as equal.
    before = {name: saved["data"].get(name, _ADDED.get(name, value)) for name, value in now["data"].items()}
    names = [name for name, value in now["data"].items() if before[name] != value and name not in _BATCH]
    if names:
        this = ", ".join(f"{name} = {now['data'][name]!r}" for name in names)
        allowed = f"this run has {this}; a run resumes with the data and settings that it began with"
        raise SettingError("the saved data state", {name: before[name] for name in names}, allowed)


def check_same_position(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises SettingError unless a loader in the state ``now`` continues with a saved state's data and sequence.

    The batches of a process that is running cannot continue from before their size was changed.
    """
    check_same_data(saved, now)
    expected = state_at(now, saved["next_step"])["next_sequence"]
    if _next_sequence(saved) != expected:
        allowed = f"this invocation's batches, of {_batch_size(now)} sequences, would be at {expected}; --resume again"
        raise SettingError("the sequence of the saved data state", _next_sequence(saved), allowed)


def _refusal(error: DataError) -> str:
    """Returns the error message for unreadable data at start-up, when settings can still be changed."""
    if not isinstance(error, TokenOutOfRange):
        return str(error)
    how = "set DataConfig.tokenizer to the one that wrote it, TokenFile.vocab_size or TokenFile.dtype"
    return f"{error}: {how}"


def _check_one_window(num_tokens: int, split: Split, sequence_length: int) -> None:
    if num_tokens < sequence_length + 1:
        allowed = (
            f"the {split} split holds {num_tokens} tokens, and a window needs {sequence_length + 1}: "
            "use a shorter sequence or more data"
        )
        if split == "validation":
            allowed += ", or a larger DataConfig.validation_share"
        raise SettingError("Loader.sequence_length", sequence_length, allowed)
