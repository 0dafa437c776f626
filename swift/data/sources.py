"""Sources of documents: texts in memory, in files or from the standard library, streams, and token files.

Only regular files are opened, and token files are read by position: a file that shrinks under a memory map kills the
process by SIGBUS, while a read by position raises an error. Every document has a domain; ``DomainRuns`` lists the
runs of consecutive documents of one domain in a token stream.

Shapes: R runs of consecutive documents of one domain, D domains.
"""

import functools
import glob
import hashlib
import os
import re
import sys
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
"""Bytes to read in one system call; Linux reads at most 2 GB."""

BLOCK_TOKENS = 16384
"""Number of tokens that count as a document in a token file without ``end_of_document``."""

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
"""First bytes of files that are easily mistaken for token files, and what the files are."""
_PLAIN = re.compile(r"^(?:\[\[\]|[^*?[])*")
"""The part of a pattern before its first wildcard."""
_IS_TEXT = np.isin(np.arange(256), [*b"\t\n\r", *range(32, 127)])
_LEAST_TEXT, _LEAST_LETTERS = 256, 12


Text = str | np.ndarray
"""A document as text, or as tokens: integers from 0 below the tokenizer's ``vocab_size``."""


class DataError(RunError):
    """Data cannot be read, is invalid, or has changed since the run started. Exit code 3."""


class ChangedFile(DataError):
    """A file has changed since it was found."""


class DocumentError(DataError):
    """A document is invalid; the message names it, and no operator is at fault."""


class TokenOutOfRange(DataError):
    """The data contains a token beyond the vocabulary, for which the model has no embedding."""


@dataclass(frozen=True)
class FileState:
    """Version of a file, determined without reading it.

    Attributes:
        num_bytes: size in bytes.
        mtime_ns: time of the last write, in nanoseconds since 1970.
    """

    num_bytes: int
    mtime_ns: int


def _with_literal_brackets(pattern: str) -> str:
    """Escapes brackets in the longest leading part of a pattern that exists under exactly this name.

    For example, ``wiki [en]/*.txt`` matches the files in the directory ``wiki [en]``, if there is one.
    """
    head = pattern
    while head and not os.path.lexists(head):
        head = os.path.dirname(head.rstrip("/"))
    return head.replace("[", "[[]") + pattern[len(head) :]


def matching(pattern: str) -> list[str]:
    """Returns the paths that match a ``glob`` pattern; does not follow symbolic links to a directory above the link."""

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
    """Random access to the tokens of a file: slices are read on demand, by position; thread-safe.

    The file stays open, so renaming or removing it does not affect the run. Every read checks the file's size and
    modification time: it must not have shrunk, and if it was written to, a sample of its tokens must be unchanged.

    Args:
        path: path of the file.
        dtype: type of a token, with its byte order.
        vocab_size: one more than the largest token allowed.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
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
        """Reads and concatenates pieces spread evenly over the file, each from an even position, without checks."""
        length = _SAMPLE_BYTES // self.dtype.itemsize
        places = np.linspace(0, max(0, len(self) - length), _SAMPLE_PIECES).astype(np.int64) // 2 * 2
        return np.concatenate([self._read(start, start + length) for start in np.unique(places).tolist()])

    def head(self, num_bytes: int) -> bytes:
        """Reads the first bytes of the file."""
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


class WeightReader(TokenReader):
    """Random access to the weights of a file, float32, in the same way.

    Args:
        path: path of the file.
    """

    def __init__(self, path: str):
        super().__init__(path, np.dtype(np.float32), sys.maxsize)


@dataclass(frozen=True)
class Document:
    """A document, read on demand.

    Args:
        name: name, the same on every machine and unique in the source.
        read: returns the text or the tokens.
        path: file that holds exactly this text, or None if there is none. Without a file, nothing derived from the text
            is cached, since a change would go unnoticed.
    """

    name: str
    read: Callable[[], Text]
    path: str | None = None


@runtime_checkable
class TextSource(Protocol):
    """A source whose documents can be listed, and read in any order."""

    def documents(self) -> list[Document]:
        """Returns all documents, in the same order on every machine."""
        ...


@runtime_checkable
class StreamSource(Protocol):
    """A source whose documents are read in order: never shuffled, and never all held in memory."""

    def stream(self, split: str) -> Iterator[Text]:
        """Starts reading the documents of a split, ``train`` or ``validation``; every call yields the same ones."""
        ...


class InMemory:
    """Documents in memory, split into training and validation as files are.

    Args:
        documents: texts, or arrays of tokens.

    Raises:
        SettingError: ``documents`` is empty.
    """

    def __init__(self, documents: Sequence[Text]):
        if not len(documents):
            raise SettingError("InMemory.documents", [], "must contain at least one document")
        self._documents = documents

    def documents(self) -> list[Document]:
        """Returns all documents, named by their position."""
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
    """The Python files of the running Python's standard library with its tests: about 30 MB on every machine.

    Installed packages are left out. A few files are not UTF-8 on purpose, to test Python; bytes that cannot be decoded
    become U+FFFD.
    """

    def documents(self) -> list[Document]:
        """Returns all files, sorted by path.

        Raises:
            SettingError: the library is not on disk as ``.py`` files.
        """
        root, paths = Path(sysconfig.get_path("stdlib")), dict[str, str]()
        for directory, inside, files in os.walk(root):
            inside[:] = set(inside) - _PACKAGE_DIRECTORIES  # os.walk does not descend into removed directories
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
    """UTF-8 text files, each a document named by its path relative to the part of ``pattern`` before any wildcard.

    A file that is not UTF-8 is an error, since the pattern probably matches a binary file by mistake.

    Args:
        pattern: pattern for ``glob``; ``**`` matches directories at any depth.
    """

    pattern: str

    def documents(self) -> list[Document]:
        """Returns all files, sorted by name.

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
        """Whether a path is a file rather than a directory; raises SettingError if it is neither.

        A missing file counts as a file; the error is raised when it is read.
        """
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
    """A file of little-endian tokens without a header, read by position and never loaded as a whole.

    Args:
        path: path of the file.
        dtype: 'uint16' or 'uint32'.
        end_of_document: EOS token, which ends each document; finding the ends reads the file once. None to treat blocks
            of ``BLOCK_TOKENS`` tokens as documents.
        vocab_size: one more than the largest token allowed; None for the size of the tokenizer's vocabulary.
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
        """Opens the file for reading slices of its tokens, uint16[num_tokens] or uint32[num_tokens].

        Only a sample is checked here, for its dtype; a token beyond the vocabulary raises an error once it is read.

        Args:
            vocab_size: one more than the largest token allowed.

        Raises:
            SettingError: the file cannot be read, is empty or of another format, its size is not a multiple of the
                dtype's, or a sample of it looks like tokens of another dtype.
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
        """Yields the positions where documents end, ascending, in pieces of int64[num].

        A document includes the token that ends it; tokens after the last such token are also a document. The ends come
        in pieces because all ends of a large file would take more memory than everything else together.

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
    """Detects, from first bytes and a sample, the format of a file that is not a token file; None if it may be one."""
    head, sample = reader.head(max(map(len, _CONTAINERS))), reader.sample().view(np.uint8)
    if len(sample) >= _LEAST_TEXT and _IS_TEXT[sample].all() and len(np.unique(sample)) >= _LEAST_LETTERS:
        return "text"
    return next((kind for begin, kind in _CONTAINERS.items() if head.startswith(begin)), None)


def are_halves(tokens_N: np.ndarray, vocab_size: int) -> bool:
    """Whether numbers read as 16-bit tokens are really the low and high halves of 32-bit tokens.

    They count as halves if every number at an odd position could be the high half of a token of the vocabulary (0 for
    up to 65,536 tokens), while at least ``_LEAST_LOW_HALVES`` numbers at even positions could not. If a share p of true
    16-bit tokens at odd positions is that small, they are mistaken for halves with a probability of at most
    p ** _LEAST_LOW_HALVES. Zero padding is not mistaken: the tokens around it are not 0 at odd positions either.

    Args:
        tokens_N: uint16 numbers, starting at an even position of the file.
        vocab_size: one more than the largest token.
    """
    low_P, high_P = tokens_N[: len(tokens_N) // 2 * 2].reshape(-1, 2).T
    most = (vocab_size - 1) >> 16
    return bool((high_P <= most).all()) and int((low_P > most).sum()) >= _LEAST_LOW_HALVES


class DomainRuns(NamedTuple):
    """Runs of consecutive documents with the same domain, in a token stream's order."""

    starts_R: np.ndarray  # int64, position of the first token of each run
    domains_R: np.ndarray  # int64, domain of each run; domains are numbered in order of first occurrence


class RunsBuilder:
    """Builds ``DomainRuns`` from documents that are added in the order of the stream."""

    def __init__(self) -> None:
        self._numbers, self._end = dict[str, int](), 0
        self._starts, self._domains = array("q"), array("q")  # not lists: there may be a run for each document

    def add(self, domain: str, num_tokens: int) -> None:
        """Adds the stream's next tokens, which belong to a document of ``domain``."""
        number = self._numbers.setdefault(domain, len(self._numbers))
        if not self._domains or self._domains[-1] != number:
            self._starts.append(self._end)
            self._domains.append(number)
        self._end += num_tokens

    def runs(self) -> DomainRuns:
        """Returns the runs so far."""
        return DomainRuns(np.array(self._starts, np.int64), np.array(self._domains, np.int64))


def domain_of(name: str) -> str:
    """Derives a document's domain from its name, by cutting off the part after the last / or :.

    The domain of a text file is its directory, and the domain of a record is its file.

    >>> domain_of("asyncio/queues.py"), domain_of("code/part-3.jsonl:17"), domain_of("record 5")
    ('asyncio', 'code/part-3.jsonl', '')
    """
    return re.split(r"[/:](?=[^/:]*$)", name, maxsplit=1)[0] if re.search("[/:]", name) else ""
