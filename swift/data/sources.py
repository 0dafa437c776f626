"""Sources of documents: texts in memory, in files or of the standard library, streams, and files of tokens.

Files are opened with care: regular files only, read by position, since a file that shrinks under a memory map ends the
process with a signal, while a read by position raises an error. A document has a domain, and the runs of documents of
one domain are noted in the order of the stream of tokens.

Shapes: R runs of documents of one domain that follow each other, D domains.
"""

import functools
import glob
import hashlib
import os
import re
import sysconfig
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from swift.errors import RunError, SettingError
from swift.files import check_regular, open_regular, read_regular

_SAMPLE_PIECES = 64
_SAMPLE_BYTES = 16384
_MOST_BYTES = 1 << 30
"""Bytes of one system call; Linux reads at most 2 GB."""

BLOCK_TOKENS = 16384
"""Tokens of a document in a token file that does not mark the ends of its documents."""

_SCAN_TOKENS, _SCAN_BLOCKS = 1 << 22, 1 << 16
_LEAST_LOW_HALVES = 64
_PACKAGE_DIRECTORIES = frozenset({"site-packages", "dist-packages"})


_CONTAINERS = {
    b"\x93NUMPY": "a NumPy array with a header (.npy)",
    b"PK\x03\x04": "a zip archive (.npz, .pt)",
    b"\x1f\x8b\x08\x00": "compressed (gzip)",
    b"\x1f\x8b\x08\x08": "compressed (gzip)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"\xfd7zXZ\x00": "compressed (xz)",
    b"PAR1": "a Parquet file",
    b"ARROW1\x00\x00": "an Arrow file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"MMIDIDX\x00": "an index of Megatron-LM (its tokens are in the .bin beside it)",
    (20240520).to_bytes(4, "little"): "of llm.c, with a header of 1,024 bytes",
    (20240801).to_bytes(4, "little"): "of llm.c, with a header of 1,024 bytes",
}
"""First bytes of files that people take for tokens, and what these are."""
_PLAIN = re.compile(r"^(?:\[\[\]|[^*?[])*")
"""The part of a pattern before its first wildcard."""
_IS_TEXT = np.isin(np.arange(256), [*b"\t\n\r", *range(32, 127)])
_LEAST_TEXT, _LEAST_LETTERS = 256, 12


Text = str | np.ndarray
"""A document: a text, or its tokens, whole numbers below the tokenizer's ``vocab_size``."""


class DataError(RunError):
    """Data that a run started with can no longer be read, or have changed. Exit code 3."""


class ChangedFile(DataError):
    """A file that is not as it was found."""


class DocumentError(DataError):
    """A fault of a document, which the message names; no operator is to blame."""


class TokenOutOfRange(DataError):
    """A token in the data for which the model has no embedding."""


@dataclass(frozen=True)
class FileState:
    """Version of a file, without reading it.

    Attributes:
        num_bytes: size in bytes.
        mtime_ns: time of the last write, in nanoseconds since 1970.
    """

    num_bytes: int
    mtime_ns: int


def _with_literal_brackets(pattern: str) -> str:
    """Returns a pattern whose directories, or file, that are there by this very name are taken by name.

    Brackets of such a name choose nothing: ``wiki [en]/*.txt`` are the texts of that directory, where it is one.
    """
    head = pattern
    while head and not os.path.lexists(head):
        head = os.path.dirname(head.rstrip("/"))
    return head.replace("[", "[[]") + pattern[len(head) :]


def matching(pattern: str) -> list[str]:
    """Returns the paths that match a pattern for ``glob``; none through a link to a directory that it is itself in."""

    @functools.cache
    def is_loop(directory: str) -> bool:
        above = os.path.dirname(directory)
        if above == directory or not directory:
            return False
        if os.path.islink(directory):
            inside, linked = os.path.realpath(above), os.path.realpath(directory)
            if os.path.commonpath([inside, linked]) == linked:
                return True
        return is_loop(above)

    paths = glob.glob(_with_literal_brackets(pattern), recursive=True)
    return [path for path in paths if not is_loop(os.path.dirname(path))] if "**" in pattern else paths


class TokenReader:
    """Tokens of a file, read by position in slices on demand.

    The file stays open: renaming or removing it does not disturb the run. Every read checks the length of the file;
    if it has been written to, a sample of it must be unchanged. Threads may share one.

    Args:
        path: path of the file.
        dtype: type of a token, with its byte order.
        vocab_size: one more than the largest token allowed.

    Raises:
        OSError: the file cannot be opened, or is not a regular one.
    """

    def __init__(self, path: str, dtype: np.dtype, vocab_size: int):
        self.path, self.dtype, self.vocab_size = path, dtype, vocab_size
        self._fd = open_regular(path)
        weakref.finalize(self, os.close, self._fd)
        self._begun = self._seen = self._state_now()
        self._sampled = zlib.crc32(self.sample().tobytes())

    @property
    def state(self) -> FileState:
        """State of the file when it was opened."""
        return self._begun

    def __len__(self) -> int:
        return self._begun.num_bytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """Reads a slice of the tokens.

        Raises:
            DataError: the file has shrunk or changed, cannot be read, or holds a token beyond the vocabulary.
        """
        start, stop, step = part.indices(len(self))
        assert step == 1
        tokens = self._read(start, stop)
        self._check_state()
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            place = int(np.argmax(tokens >= self.vocab_size))
            raise TokenOutOfRange(
                f"{self.path} holds token {tokens[place]} (token {start + place} of the file), the vocabulary ends at "
                f"{self.vocab_size - 1}"
            )
        return tokens

    def sample(self) -> np.ndarray:
        """Reads pieces spread evenly over the file, each from an even position, and joins them without checks."""
        length = _SAMPLE_BYTES // self.dtype.itemsize
        places = np.linspace(0, max(0, len(self) - length), _SAMPLE_PIECES).astype(np.int64) // 2 * 2
        return np.concatenate([self._read(start, start + length) for start in np.unique(places).tolist()])

    def head(self, num_bytes: int) -> bytes:
        """Reads the first bytes."""
        return os.pread(self._fd, num_bytes, 0)

    def _read(self, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        first, last = start * size, min(stop, len(self)) * size
        pieces = []
        try:
            while first < last:
                pieces.append(os.pread(self._fd, min(last - first, _MOST_BYTES), first))
                if not pieces[-1]:
                    raise self._shrunk(self._state_now().num_bytes)
                first += len(pieces[-1])
        except OSError as error:
            raise self._unreadable(error) from error
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), self.dtype)

    def _check_state(self) -> None:
        now = self._state_now()
        if now.num_bytes < self._begun.num_bytes:
            raise self._shrunk(now.num_bytes)
        if now != self._seen:
            if zlib.crc32(self.sample().tobytes()) != self._sampled:
                raise DataError(f"{self.path} has been overwritten since the run opened it")
            self._seen = now

    def _shrunk(self, num_bytes: int) -> DataError:
        was = self._begun.num_bytes
        return DataError(f"{self.path} has shrunk from {was} to {num_bytes} bytes since the run opened it")

    def _state_now(self) -> FileState:
        try:
            status = os.fstat(self._fd)
        except OSError as error:
            raise self._unreadable(error) from error
        return FileState(status.st_size, status.st_mtime_ns)

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.path} cannot be read any more: {error.strerror}")


@dataclass(frozen=True)
class Document:
    """A text, or its tokens, read on demand.

    Args:
        name: name, the same on every machine and unique in the source.
        read: function that returns the text.
        path: file that holds exactly this text; None if there is none, and nothing made of the text can be used again,
            since a change would go unnoticed.
    """

    name: str
    read: Callable[[], Text]
    path: str | None = None


@runtime_checkable
class TextSource(Protocol):
    """A source of texts."""

    def documents(self) -> list[Document]:
        """Returns all documents, in the same order on every machine."""
        ...


@runtime_checkable
class StreamSource(Protocol):
    """A source of documents that are read once, in their order: never shuffled, and never held in memory."""

    def stream(self, split: str) -> Iterator[Text]:
        """Begins to read the documents of a split, ``train`` or ``validation``: the same ones at every call."""
        ...


class InMemory:
    """Documents in memory; they are split like those of files.

    Args:
        documents: texts, or arrays of tokens.

    Raises:
        SettingError: there is no document.
    """

    def __init__(self, documents: Sequence[Text]):
        if not len(documents):
            raise SettingError("InMemory.documents", [], "must be at least one document")
        self._documents = documents

    def documents(self) -> list[Document]:
        """Returns all documents, named by their place."""
        return [
            Document(f"document-{number}", functools.partial(self._documents.__getitem__, number))
            for number in range(len(self._documents))
        ]

    def __repr__(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for text in self._documents:
            digest.update(text.encode() if isinstance(text, str) else np.asarray(text).astype("<u4").tobytes())
        return f"InMemory({len(self._documents)} documents, digest {digest.hexdigest()})"


@dataclass(frozen=True)
class StandardLibrary:
    """The Python files of the running Python's standard library, its tests included: about 30 MB on every machine.

    Installed packages are left out. A few of its files are not UTF-8 on purpose, to test Python; what cannot be
    decoded there becomes U+FFFD.
    """

    def documents(self) -> list[Document]:
        """Returns all files, by path.

        Raises:
            SettingError: the library is not on disk as ``.py`` files.
        """
        root, paths = Path(sysconfig.get_path("stdlib")), dict[str, str]()
        for directory, inside, files in os.walk(root):
            inside[:] = set(inside) - _PACKAGE_DIRECTORIES  # so that they are not walked
            module_paths = (os.path.join(directory, file) for file in files if file.endswith(".py"))
            paths |= {os.path.relpath(path, root): path for path in module_paths}
        if not paths:
            allowed = f"{root} holds no .py files, so this Python cannot serve as data: use TextFiles"
            raise SettingError("DataConfig.source", self, allowed)
        return [Document(name, functools.partial(self._read, Path(path)), path) for name, path in sorted(paths.items())]

    def _read(self, path: Path) -> str:
        try:
            return path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            raise SettingError("DataConfig.source", self, f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 text files, each a document, named by its path below the part of ``pattern`` that has no wildcard.

    A file that is not UTF-8 is refused, since a binary file among the texts is a mistake of the pattern.

    Args:
        pattern: pattern for ``glob``; ``**`` matches directories at any depth.
    """

    pattern: str

    def documents(self) -> list[Document]:
        """Returns all files, by name.

        Raises:
            SettingError: no file matches, or all are empty.
        """
        paths = [Path(path) for path in matching(self.pattern) if self._is_file(path)]
        if not paths:
            raise SettingError("TextFiles.pattern", self.pattern, "no file matches")
        if all(os.path.exists(path) and os.path.getsize(path) == 0 for path in paths):
            raise SettingError("TextFiles.pattern", self.pattern, f"all files that match ({len(paths)}) are empty")
        plain = "".join(_PLAIN.findall(_with_literal_brackets(self.pattern))[:1]).replace("[[]", "[")
        directory = os.path.dirname(plain) or "."
        named = {os.path.relpath(path, directory): path for path in paths}
        return [Document(name, functools.partial(self._read, path), str(path)) for name, path in sorted(named.items())]

    def _is_file(self, path: str) -> bool:
        """Refuses what is neither a file nor a directory; a file that has gone is reported when it is read."""
        try:
            check_regular(path)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            return False
        except OSError as error:
            raise SettingError("TextFiles.pattern", self.pattern, f"cannot read {path}: {error.strerror}") from error
        return True

    def _read(self, path: Path) -> str:
        try:
            return read_regular(path).decode("utf-8")
        except OSError as error:
            raise SettingError("TextFiles.pattern", self.pattern, f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            allowed = f"{path} is not UTF-8 text (byte {error.start})"
            raise SettingError("TextFiles.pattern", self.pattern, allowed) from error


@dataclass(frozen=True)
class TokenFile:
    """A file of little-endian tokens without a header, read by position and never loaded whole.

    Args:
        path: path of the file.
        dtype: 'uint16' or 'uint32'.
        end_of_document: token that ends each document; without it, blocks of ``BLOCK_TOKENS`` tokens count as
            documents. Finding the ends reads the file once.
        vocab_size: one more than the largest token allowed; that of the tokenizer unless given.
    """

    path: str
    dtype: str = "uint16"
    end_of_document: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("uint16", "uint32"):
            raise SettingError("TokenFile.dtype", self.dtype, "must be 'uint16' or 'uint32'")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise SettingError("TokenFile.vocab_size", self.vocab_size, "must be a whole number of at least 1")

    def tokens(self, vocab_size: int) -> TokenReader:
        """Opens the tokens, uint16[num_tokens] or uint32[num_tokens], to be read in slices.

        Only a sample is checked here; an error elsewhere in the file is reported when that part is read.

        Args:
            vocab_size: one more than the largest token allowed.

        Raises:
            SettingError: the file cannot be read, is not a file or is empty, its size is not a multiple of the
                dtype's, or a sample of it is of another dtype or exceeds the vocabulary.
        """
        dtype = np.dtype(self.dtype).newbyteorder("<")
        try:
            reader = TokenReader(self.path, dtype, vocab_size)
        except OSError as error:
            raise SettingError("TokenFile.path", self.path, f"cannot be read: {error.strerror}") from error
        num_bytes = reader.state.num_bytes
        if num_bytes == 0:
            raise SettingError("TokenFile.path", self.path, "the file is empty")
        if num_bytes % dtype.itemsize:
            allowed = f"{self.path} holds {num_bytes} bytes, no multiple of {dtype.itemsize}"
            raise SettingError("TokenFile.dtype", self.dtype, allowed)
        container = _container(reader)
        if container:
            allowed = (
                f"is {container}, whose bytes are no tokens: TokenFile reads numbers alone, as NumPy's tofile writes"
            )
            raise SettingError("TokenFile.path", self.path, allowed)
        sample = reader.sample()
        if self.dtype == "uint16" and num_bytes % 4 == 0 and are_halves(sample, vocab_size):
            allowed = (
                f"{self.path} holds 32-bit tokens: in a sample of {len(sample)} every second number is at most "
                f"{(vocab_size - 1) >> 16}, and the others are not: set it to 'uint32'"
            )
            raise SettingError("TokenFile.dtype", self.dtype, allowed)
        return reader

    def document_ends(self, tokens_N: np.ndarray | TokenReader) -> Iterator[np.ndarray]:
        """Yields the ends of the documents in the file, ascending, a piece at a time: int64[num].

        A document includes the token that ends it; what follows the last such token is a document too. Pieces, since
        the ends of a large file would take more memory than all else together.

        Raises:
            SettingError: ``end_of_document`` occurs nowhere.
        """
        num_tokens, last = len(tokens_N), 0
        if self.end_of_document is None:
            for start in range(0, num_tokens, _SCAN_BLOCKS * BLOCK_TOKENS):
                stop = min(num_tokens, start + _SCAN_BLOCKS * BLOCK_TOKENS)
                yield np.append(np.arange(start + BLOCK_TOKENS, stop, BLOCK_TOKENS), stop)
            return
        for start in range(0, num_tokens, _SCAN_TOKENS):
            ends = np.flatnonzero(tokens_N[start : start + _SCAN_TOKENS] == self.end_of_document) + start + 1
            if len(ends):
                last = int(ends[-1])
                yield ends
        if not last:
            allowed = f"{self.path} holds no such token"
            raise SettingError("TokenFile.end_of_document", self.end_of_document, allowed)
        if last < num_tokens:
            yield np.array([num_tokens])


def _container(reader: TokenReader) -> str | None:
    """Returns what a file is that begins as one of another kind; None if it may be of tokens alone."""
    head, sample = reader.head(max(map(len, _CONTAINERS))), reader.sample().view(np.uint8)
    if len(sample) >= _LEAST_TEXT and _IS_TEXT[sample].all() and len(np.unique(sample)) >= _LEAST_LETTERS:
        return "text"
    return next((kind for begin, kind in _CONTAINERS.items() if head.startswith(begin)), None)


def are_halves(tokens_N: np.ndarray, vocab_size: int) -> bool:
    """Whether numbers read as 16-bit tokens are the low and high halves of 32-bit ones.

    They are taken for such if every number at an odd place could be the high half of a token of the vocabulary (0
    for up to 65,536 tokens) and at least ``_LEAST_LOW_HALVES`` of those at even places could not. Tokens of 16 bits,
    of which at most a share p at odd places is so small, look like that with a probability of at most
    p ** _LEAST_LOW_HALVES; padding with zeros does not, since where numbers at even places are not 0 some at odd
    places are not either.

    Args:
        tokens_N: uint16 numbers, from an even position of the file.
        vocab_size: one more than the largest token.
    """
    low_P, high_P = tokens_N[: len(tokens_N) // 2 * 2].reshape(-1, 2).T
    most = (vocab_size - 1) >> 16
    return bool((high_P <= most).all()) and int((low_P > most).sum()) >= _LEAST_LOW_HALVES


class DomainRuns(NamedTuple):
    """Runs of documents of one domain, in the order of a stream of tokens."""

    starts_R: np.ndarray  # int64, position of the first token of each run
    domains_R: np.ndarray  # int64, number of the domain of each run, in the order in which the domains come first


class RunsBuilder:
    """Runs of the documents that are added, in the order of the stream."""

    def __init__(self) -> None:
        self._numbers, self._end = dict[str, int](), 0
        self._starts, self._domains = array("q"), array("q")  # a run may be as short as a document

    def add(self, domain: str, num_tokens: int) -> None:
        """Adds the next tokens, of a document of a domain."""
        number = self._numbers.setdefault(domain, len(self._numbers))
        if not self._domains or self._domains[-1] != number:
            self._starts.append(self._end)
            self._domains.append(number)
        self._end += num_tokens

    def runs(self) -> DomainRuns:
        """Returns the runs so far."""
        return DomainRuns(np.array(self._starts, np.int64), np.array(self._domains, np.int64))


def domain_of(name: str) -> str:
    """Returns the domain of a document without a field that says it: its name without the part after the last / or :.

    That is the directory of a text file, and the file of a record.

    >>> domain_of("asyncio/queues.py"), domain_of("code/part-3.jsonl:17"), domain_of("record 5")
    ('asyncio', 'code/part-3.jsonl', '')
    """
    return re.split(r"[/:](?=[^/:]*$)", name, maxsplit=1)[0] if re.search("[/:]", name) else ""
