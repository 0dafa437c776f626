"""The tokens of a split as one sequence that can be read in any part.

Shapes: N tokens at hand, S spans of them that belong to the split.
"""

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from swift.data.config import DataConfig, Split, in_split
from swift.data.files import FileState, TokenReader
from swift.data.sources import Document, TokenFile
from swift.data.tokenizer import Tokenizer

_CHECKSUM_PIECES = 64
_CHECKSUM_TOKENS = 4096


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Spans of an array of tokens, joined end to end without copying them.

    Args:
        tokens_N: unsigned integers, in memory or in a file.
        starts_S: int64, start of each span in ``tokens_N``.
        offsets_S: int64, start of each span in the stream, ascending from 0.
        num_tokens: length of the stream.
        known_digest: digest of all its tokens, known from an index of texts.
    """

    tokens_N: np.ndarray | TokenReader
    starts_S: np.ndarray
    offsets_S: np.ndarray
    num_tokens: int
    known_digest: str | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads the tokens ``start`` to ``stop`` of the stream, [stop - start]; fewer or none past its end."""
        stop = min(stop, self.num_tokens)
        if start >= stop:
            return self.tokens_N[:0]
        first = int(np.searchsorted(self.offsets_S, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets_S, stop, side="left")) - 1
        pieces = []
        for span in range(first, last + 1):
            begin = int(self.offsets_S[span])
            end = int(self.offsets_S[span + 1]) if span < last else stop
            shift = int(self.starts_S[span]) - begin
            pieces.append(self.tokens_N[max(begin, start) + shift : end + shift])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @property
    def file(self) -> FileState | None:
        """State of the token file; None if the tokens are those of texts."""
        return self.tokens_N.state if isinstance(self.tokens_N, TokenReader) and self.known_digest is None else None

    def digest(self) -> str | None:
        """Digest of all tokens of the stream; None for a token file, which is too large to be read for it."""
        if isinstance(self.tokens_N, TokenReader):
            return self.known_digest
        return new_digest(self.read(0, self.num_tokens).data).hexdigest()

    def checksum(self) -> int:
        """Computes a CRC-32 of pieces spread evenly over the stream: milliseconds for a file of any size."""
        last_start = max(0, self.num_tokens - _CHECKSUM_TOKENS)
        crc = 0
        for start in np.unique(np.linspace(0, last_start, _CHECKSUM_PIECES).astype(np.int64)).tolist():
            crc = zlib.crc32(self.read(start, start + _CHECKSUM_TOKENS).astype("<u4").tobytes(), crc)
        return crc


def new_digest(content: memoryview | bytes = b"") -> "hashlib.blake2b":
    """Starts a digest of tokens, to which more can be added."""
    return hashlib.blake2b(content, digest_size=16)


def open_stream(config: DataConfig, split: Split) -> TokenStream:
    """Reads the documents of a split in the order of the source, each followed by a separator; empty ones are left out.

    Texts are read and tokenized here, into memory, with as few bytes per token as the vocabulary allows. A token
    file stays on disk, and its documents keep the ends they have there.

    Raises:
        SettingError: the source cannot be read, or a split would have no document.
        DataError: a token is beyond the vocabulary.
    """
    source = config.source
    if isinstance(source, TokenFile):
        tokens_N = source.tokens(config.vocab_size)
        return TokenStream(tokens_N, *spans_of(source.document_bounds(tokens_N), split, config.validation_share))
    documents = source.documents()
    members = in_split((document.name for document in documents), split, config.validation_share)
    chosen = [document for document, member in zip(documents, members, strict=True) if member]
    dtype = np.min_scalar_type(config.tokenizer.vocab_size - 1)
    cut_N = np.concatenate([np.empty(0, dtype), *document_tokens(chosen, config.tokenizer)])
    return TokenStream(cut_N, np.zeros(1, np.int64), np.zeros(1, np.int64), len(cut_N))


def document_tokens(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the tokens of each document that is not empty, with its separator, in the smallest unsigned type."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    separator_1 = np.array([tokenizer.separator], dtype)
    for document in documents:
        tokens = tokenizer.encode(document.read())
        if len(tokens):
            assert int(tokens.max()) < tokenizer.vocab_size, f"{tokenizer} exceeds its vocabulary"
            yield from (tokens.astype(dtype, copy=False), separator_1)


def spans_of(bounds: np.ndarray, split: Split, validation_share: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Finds the spans of a split's documents in a token file.

    Args:
        bounds: int64[num_documents + 1], starts of all documents, then the end of the file.
        split: split to select.
        validation_share: expected share of the documents used for validation.

    Returns:
        (``starts_S``, ``offsets_S``, ``num_tokens``), see ``TokenStream``.

    Raises:
        SettingError: the split would have no document.
    """
    members = in_split((str(number) for number in range(len(bounds) - 1)), split, validation_share)
    # Neighbours of the same split are one span: a span begins and ends where membership changes.
    changes = np.flatnonzero(np.diff(members, prepend=False, append=False))
    starts_S, ends_S = bounds[changes[0::2]], bounds[changes[1::2]]
    ends_in_stream = np.cumsum(ends_S - starts_S)
    return starts_S, ends_in_stream - (ends_S - starts_S), int(ends_in_stream[-1])
