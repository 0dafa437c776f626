"""Training and validation batches by iteration number: Grain shuffles, repeats and batches the windows of a split."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, get_args

import grain
import numpy as np
from jaxtyping import Bool

from swift.data.config import DataConfig, Mixture, Split
from swift.data.index import corpus_streams
from swift.data.sources import DataError, TokenFile, TokenOutOfRange
from swift.data.stream import SequentialStream, TokenStream
from swift.data.tokenizer import Tokenizer
from swift.data.windows import Batch, JoinedWindows, Windows, count_windows, training_order
from swift.errors import SettingError, check_count

_STATE_VERSION = 1
_ADDED: dict[str, Any] = {"locality": 0.0}
"""Default values of settings that states saved by older versions lack."""


class Loader(Iterator[Batch]):
    """An endless iterator over a split's batches; a batch depends only on the arguments and the iteration number.

    Training windows are reshuffled every epoch, and each is seen once per epoch; a batch may span two epochs.
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
        draws_keys: whether batches have random keys, which follow from the seed, the iteration and the sequence.

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

        self._config = config
        self._num_microbatches, self._draws_keys = num_microbatches, draws_keys
        counts = [count_windows(stream.num_tokens, sequence_length) for stream in streams]
        self._num_windows = sum(counts)
        num_sequences = self._num_sequences = num_microbatches * sequences_per_microbatch
        self._num_batches_per_epoch = -(-self._num_windows // num_sequences)
        self._sequential = next((stream for stream in streams if isinstance(stream, SequentialStream)), None)
        self._tokens_per_batch = num_sequences * sequence_length
        if self._sequential is not None:
            self._sequential.keep(num_kept * self._tokens_per_batch + 1)  # one more for the label of the last input
        weighs = config.weighs_tokens
        parts = [Windows(stream, sequence_length, count, weighs) for stream, count in zip(streams, counts, strict=True)]
        if self._sequential is not None:  # the stream is endless and cannot be shuffled
            endless = grain.MapDataset.source(parts[0])
        elif split == "train":
            endless = training_order(config, parts, seed, num_sequences)
        else:
            filled = JoinedWindows(parts, self._num_batches_per_epoch * num_sequences)
            endless = grain.MapDataset.source(filled).repeat()
        # An endless dataset has no remainder to drop, but without ``drop_remainder`` Grain's length overflows for
        # batches of one.
        self._windows, none_T = endless, np.zeros(sequence_length, np.int32)
        weights_T = none_T.astype(np.float32) if weighs else None
        self._padding = Batch(none_T, none_T, none_T.astype(bool), weights=weights_T)
        self._microbatches = endless.batch(sequences_per_microbatch, drop_remainder=True)
        self._batches = self._microbatches.batch(num_microbatches, drop_remainder=True)
        self._next_step = 0
        self._identity: dict[str, Any] = {
            "split": split,
            "num_microbatches": num_microbatches,
            "sequences_per_microbatch": sequences_per_microbatch,
            "sequence_length": sequence_length,
            "seed": seed,
            "locality": float(config.locality) if split == "train" else 0.0,
        } | identity
        self._file = streams[0].file if len(streams) == 1 else None

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
        assert step >= 0
        if is_read is None or is_read.all():
            return self._batches[step]._replace(keys=self._keys(step))
        first = step * is_read.size
        windows = [self._windows[first + n] if reads else self._padding for n, reads in enumerate(is_read.flat)]
        inputs, labels, valid = (np.stack(leaf) for leaf in zip(*(window[:3] for window in windows), strict=True))
        weights = [window.weights for window in windows if window.weights is not None]
        batch = Batch(inputs, labels, valid, weights=np.stack(weights) if weights else None)
        return batch.map(lambda leaf: leaf.reshape(*is_read.shape, -1))._replace(keys=self._keys(step))

    def microbatch(self, step: int, index: int) -> Batch:
        """Loads micro-batch ``index`` of ``batch(step)`` without the others: arrays [B, T]."""
        assert step >= 0
        assert 0 <= index < self._num_microbatches
        keys, batch = self._keys(step), self._microbatches[step * self._num_microbatches + index]
        return batch if keys is None else batch._replace(keys=keys[index])

    def _keys(self, step: int) -> np.ndarray | None:
        """Returns the random key of each sequence of an iteration, uint32[M, B, 2]."""
        if not self._draws_keys:
            return None
        words = np.random.SeedSequence((self._identity["seed"], step)).generate_state(2 * self._num_sequences)
        return words.reshape(self._num_microbatches, -1, 2)

    def skip_to(self, step: int) -> None:
        """Reads a ``StreamSource`` up to an iteration, so that loading that iteration's batch later is fast.

        Does nothing for other sources, which load every batch equally fast.

        Raises:
            DataError: the stream cannot be read.
        """
        if self._sequential is not None:
            self._sequential.skip_to(step * self._tokens_per_batch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self._next_step)
        self._next_step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Returns the iterator's position and the identity of its data, JSON-serializable."""
        file = None if self._file is None else asdict(self._file)
        return {"version": _STATE_VERSION, "next_step": self._next_step, "data": dict(self._identity), "file": file}

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Restores a saved position: the next batch is the one that would have come next.

        Returns:
            Warnings: one line if a token file has been written to since, but has the same length and the same sampled
            tokens; the rest is not compared.

        Raises:
            SettingError: another version wrote the state, or its data, order or batch shape differ; the error says
                which.
        """
        check_same_data(state, self.state())
        self._next_step = int(state["next_step"])
        if self._file is None or state.get("file") in (None, asdict(self._file)):
            return []
        source = self._config.source_of(self._identity["split"])
        assert isinstance(source, TokenFile)
        return [
            f"{source.path} has been written to since the checkpoint: it has as many tokens, and a "
            "sample of them is the same; the rest was not compared"
        ]


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


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises SettingError unless two loader states agree on data, order and batch shape."""
    if saved.get("version") != _STATE_VERSION:
        allowed = f"must be {_STATE_VERSION}: another version of Swift wrote this state"
        raise SettingError("version of the saved data state", saved.get("version"), allowed)
    # States of older versions lack fields that were added since: these take their default, or count as equal.
    before = {name: saved["data"].get(name, _ADDED.get(name, value)) for name, value in now["data"].items()}
    names = [name for name, value in now["data"].items() if before[name] != value]
    if names:
        this = ", ".join(f"{name} = {now['data'][name]!r}" for name in names)
        allowed = f"this run has {this}; a run resumes with the data and settings that it began with"
        raise SettingError("the saved data state", {name: before[name] for name in names}, allowed)


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
