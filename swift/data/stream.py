"""Token streams: all tokens of a split as one sequence, with random access or read once from start to end.

A ``TokenStream`` has random access; it concatenates the spans of a split without copying them. A ``SequentialStream``
reads documents in the source's order, without a file, an index or shuffling.

Shapes: N tokens in memory or in the file, S spans of them that belong to the split, K documents of a piece.
"""

import hashlib
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swift.data.config import DataConfig, Split, cut_at, split_places
from swift.data.corpus import pipeline_tokens, tokens_of
from swift.data.sources import DataError, DomainRuns, FileState, RunsBuilder, StreamSource, Text, TokenFile, TokenReader
from swift.errors import error_line

_BOUNDLESS = 2**40
"""Stands for an unknown length: more tokens than any run reads."""
_AT_ONCE = 64
_CHECKSUM_PIECES = 64
_CHECKSUM_TOKENS = 4096


class SequentialStream:
    """An endless token stream without random access; only the most recently read tokens can be read again.

    Reading further back restarts the source and skips forward, as fast as the source yields documents. The source is
    also restarted after its last document, so an epoch is one pass over it.

    Args:
        begin: starts the source; yields the tokens of each document, with a separator.
        name: name of the source, for errors.
    """

    file = None
    num_tokens = _BOUNDLESS

    def __init__(self, begin: Callable[[], Iterator[np.ndarray]], name: str):
        self._begin, self._name, self._num_kept = begin, name, 0
        self._start = self._end = self._furthest = 0
        self._restart()

    def keep(self, num_tokens: int) -> None:
        """Sets how many tokens before the furthest one read stay in memory."""
        self._num_kept = num_tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads the tokens ``start`` to ``stop`` of the stream, [stop - start].

        Raises:
            DataError: the stream has no documents, or reading it fails.
        """
        if start < self._start:
            self._restart()
        self._furthest = max(self._furthest, stop)
        while self._end < stop:
            piece = np.concatenate(self._more())
            self._recent.append(piece)
            self._end += len(piece)
            self._drop(min(start, self._furthest - self._num_kept))
        pieces, end = list[np.ndarray](), self._end
        for piece in reversed(self._recent):  # reads are mostly near the end
            begin, end = end - len(piece), end - len(piece)
            pieces.append(piece[max(0, start - begin) : max(0, stop - begin)])
            if begin <= start:
                break
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.uint32)

    def skip_to(self, position: int) -> None:
        """Advances to a position, as fast as the source yields documents; the kept tokens before it stay readable.

        Raises:
            DataError: the stream has no documents, or reading it fails.
        """
        self.read(position, position)

    def digest(self) -> None:
        """Returns None: a stream's digest is unknown until all of it has been read."""

    def checksum(self) -> int:
        """Computes a CRC-32 of the stream's first tokens."""
        return zlib.crc32(self.read(0, _CHECKSUM_TOKENS).astype("<u4").tobytes())

    def _restart(self) -> None:
        self._pieces = self._endless()
        self._recent = deque[np.ndarray]()  # the tokens from ``_start`` to ``_end``
        self._start = self._end = self._furthest = 0

    def _drop(self, before: int) -> None:
        """Drops pieces that end before a position."""
        while self._recent and self._start + len(self._recent[0]) <= before:
            self._start += len(self._recent.popleft())

    def _more(self) -> list[np.ndarray]:
        try:
            pieces = list(itertools.islice(self._pieces, _AT_ONCE))
        except DataError:
            raise
        except Exception as error:  # raised by the user's code
            raise DataError(f"{self._name} cannot be read: {error_line(error)}") from error
        if not pieces:  # an endless generator ends only after it has raised
            raise DataError(f"{self._name} cannot be read any more")
        return pieces

    def _endless(self) -> Iterator[np.ndarray]:
        while True:
            is_empty = True
            for tokens in self._begin():
                is_empty = False
                yield tokens
            if is_empty:
                raise DataError(f"{self._name} has no documents")


@dataclass(frozen=True, eq=False)
class TokenStream:
    """A token stream with random access: spans of a token array, joined end to end without copying them.

    Args:
        tokens_N: unsigned integers, in memory or in a file.
        starts_S: int64, start of each span in ``tokens_N``.
        offsets_S: int64, start of each span in the stream, ascending from 0.
        num_tokens: length of the stream.
        known_digest: digest of all tokens if they come from an index of texts; otherwise None.
        runs: runs of consecutive documents of one domain for training texts; otherwise None.
        weights_N: float32, weight of each token's loss; None if all are 1.
    """

    tokens_N: np.ndarray | TokenReader
    starts_S: np.ndarray
    offsets_S: np.ndarray
    num_tokens: int
    known_digest: str | None = None
    runs: DomainRuns | None = None
    weights_N: np.ndarray | TokenReader | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads the tokens ``start`` to ``stop`` of the stream, [stop - start]; fewer, or none, past the end."""
        return self._read(self.tokens_N, start, stop)

    def read_weights(self, start: int, stop: int) -> np.ndarray:
        """Reads the weights of the losses of the tokens that ``read`` returns, float32."""
        if self.weights_N is None:
            return np.ones(max(0, min(stop, self.num_tokens) - start), np.float32)
        return self._read(self.weights_N, start, stop)

    def _read(self, array_N: np.ndarray | TokenReader, start: int, stop: int) -> np.ndarray:
        stop = min(stop, self.num_tokens)
        if start >= stop:
            return array_N[:0]
        first = int(np.searchsorted(self.offsets_S, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets_S, stop, side="left")) - 1
        pieces = []
        for span in range(first, last + 1):
            begin = int(self.offsets_S[span])
            end = int(self.offsets_S[span + 1]) if span < last else stop
            shift = int(self.starts_S[span]) - begin
            pieces.append(array_N[max(begin, start) + shift : end + shift])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @property
    def file(self) -> FileState | None:
        """State of the token file; None if the tokens come from texts."""
        return self.tokens_N.state if isinstance(self.tokens_N, TokenReader) and self.known_digest is None else None

    def by_domain(self) -> tuple["TokenStream", np.ndarray]:
        """Reorders the stream by domain; the documents of a domain keep their relative order.

        Returns:
            The reordered stream, and the position where each domain ends in it, int64[num_domains].
        """
        assert self.runs is not None, "only texts for training have domains"
        assert len(self.starts_S) == 1, "the tokens of texts are one span"
        lengths_R = np.diff(self.runs.starts_R, append=self.num_tokens)
        order_R = np.argsort(self.runs.domains_R, kind="stable")
        ends_R = np.cumsum(lengths_R[order_R])
        last_R = np.flatnonzero(np.diff(self.runs.domains_R[order_R], append=-1))
        starts_R, offsets_R = self.runs.starts_R[order_R], ends_R - lengths_R[order_R]
        joined = TokenStream(self.tokens_N, starts_R, offsets_R, self.num_tokens, weights_N=self.weights_N)
        return joined, ends_R[last_R]

    def digest(self) -> str | None:
        """Returns a digest of all tokens and weights, or None for a token file, which may be too large to read."""
        if isinstance(self.tokens_N, TokenReader):
            return self.known_digest
        digest = new_digest(self.read(0, self.num_tokens).data).hexdigest()
        if self.weights_N is None:
            return digest
        return joint_digest(digest, new_digest(self.read_weights(0, self.num_tokens).data).hexdigest())

    def checksum(self) -> int:
        """Computes a CRC-32 of pieces spread evenly over the stream, within milliseconds for any size."""
        last_start = max(0, self.num_tokens - _CHECKSUM_TOKENS)
        crc = 0
        for start in np.unique(np.linspace(0, last_start, _CHECKSUM_PIECES).astype(np.int64)).tolist():
            crc = zlib.crc32(self.read(start, start + _CHECKSUM_TOKENS).astype("<u4").tobytes(), crc)
        return crc


def new_digest(content: memoryview | bytes = b"") -> "hashlib.blake2b":
    """Starts a digest of tokens, to be extended by ``update``."""
    return hashlib.blake2b(content, digest_size=16)


def joint_digest(tokens: str, weights: str) -> str:
    """Joins the digests of a stream's tokens and of their weights."""
    return f"{tokens} {weights}"


def open_stream(config: DataConfig, split: Split) -> TokenStream | SequentialStream:
    """Opens the token stream of a split without an index: documents in the source's order, each with a separator.

    Empty documents are left out. Texts are read and tokenized here, into memory, with as few bytes per token as the
    vocabulary allows. A token file stays on disk, and no separators are added to its documents. A ``StreamSource`` is
    read during the run.

    Raises:
        SettingError: the source cannot be read.
        DataError: a token is beyond the vocabulary.
    """
    source = config.source_of(split)
    if isinstance(source, StreamSource):
        return SequentialStream(lambda: _streamed(config, source.stream(split)), repr(source))
    if isinstance(source, TokenFile):
        tokens_N = source.tokens(config.vocab_size)
        return TokenStream(tokens_N, *spans_of(config, source.document_ends(tokens_N))[split])
    dtype = np.min_scalar_type(config.tokenizer.vocab_size - 1)
    pieces, factors, builder = [np.empty(0, dtype)], [np.empty(0, np.float32)], RunsBuilder()

    def add(side: Split, domain: str, tokens: np.ndarray, weights: np.ndarray | None) -> None:
        if side == split:
            pieces.append(tokens)
            factors.extend([] if weights is None else [weights])
            builder.add(domain, len(tokens))

    pipeline_tokens(config, add, split=split)
    joined_N, zero_1 = np.concatenate(pieces), np.zeros(1, np.int64)
    weights_N = np.concatenate(factors) if config.weighs_tokens else None
    return TokenStream(joined_N, zero_1, zero_1, len(joined_N), runs=builder.runs(), weights_N=weights_N)


def _streamed(config: DataConfig, texts: Iterator[Text]) -> Iterator[np.ndarray]:
    for text in texts:
        tokens = tokens_of(text, config.tokenizer, "a document of the stream")
        if len(tokens):
            yield np.append(tokens, tokens.dtype.type(config.tokenizer.separator))


class Spans(NamedTuple):
    """The spans of a token file that belong to a split, see ``TokenStream``."""

    starts_S: np.ndarray
    offsets_S: np.ndarray
    num_tokens: int


def spans_of(config: DataConfig, ends: Iterable[np.ndarray]) -> dict[Split, Spans]:
    """Divides a token file's documents between the splits, and merges adjacent documents of a split into spans.

    The documents themselves are never held in memory, only the positions where the split changes.

    Args:
        config: data settings.
        ends: ends of all documents, see ``TokenFile.document_ends``.
    """
    if config.validation_source is not None:
        (last,) = deque(ends, maxlen=1)  # keeps one piece at a time in memory
        spans = _spans(np.array([0, last[-1]]))
        return {"train": spans, "validation": spans}
    # ``bounds`` are the positions where the split changes, beginning with training at 0: if the first document is for
    # validation, the first bound is repeated. ``nearest`` are the documents with the smallest and the largest hash.
    bounds, nearest, begin, number, validated = [np.zeros(1, np.int64)], list[_Document](), 0, 0, False
    for ends_K in ends:
        starts_K = np.concatenate([[begin], ends_K[:-1]])
        places_K = split_places(str(n) for n in range(number, number + len(ends_K)))
        validates_K = places_K < config.validation_share
        bounds.append(starts_K[np.diff(validates_K, prepend=validated)])
        extremes = [_Document(places_K[at], int(starts_K[at]), int(ends_K[at])) for at in _extremes(places_K)]
        nearest = [min(extremes[0], *nearest[:1]), max(extremes[1], *nearest[1:])] if nearest else extremes
        begin, validated, number = int(ends_K[-1]), bool(validates_K[-1]), number + len(ends_K)
    if number == 1:
        bounds = [np.array([0, cut_at(begin, config.validation_share)])]
    elif nearest[0].place >= config.validation_share:  # no validation document: take the one with the smallest hash
        bounds = [np.array([0, *nearest[0][1:]])]
    elif nearest[1].place < config.validation_share:
        bounds = [np.array([0, 0, *nearest[1][1:]])]  # only the one with the largest hash is for training
    joined = np.concatenate([*bounds, [begin]])
    return {"train": _spans(joined), "validation": _spans(joined[1:])}


class _Document(NamedTuple):
    """A document in a token file: the hash of its name, its start and its end."""

    place: float
    start: int
    end: int


def _extremes(places_K: np.ndarray) -> tuple[int, int]:
    return int(places_K.argmin()), int(places_K.argmax())


def _spans(bounds: np.ndarray) -> Spans:
    """Returns every other interval between the bounds, beginning with the first; omits empty ones."""
    starts_S, ends_S = bounds[:-1:2], bounds[1::2]
    is_some = ends_S > starts_S
    starts_S, lengths_S = starts_S[is_some], (ends_S - starts_S)[is_some]
    return Spans(starts_S, np.cumsum(lengths_S) - lengths_S, int(lengths_S.sum()))
