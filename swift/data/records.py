"""Record sources: rows in memory, documents, JSON Lines files (also compressed), and ArrayRecord files.

``RecordSource`` is the interface that a pipeline requires; it reads records by number. Files are matched by a pattern,
locally or in remote storage. A source stores the size and modification time of each file that it found, and rejects a
file that has changed since.
"""

import functools
import gzip
import hashlib
import json
import os
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from codecs import BOM_UTF8
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from hashlib import sha256
from io import BytesIO
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from etils import epath

from swift.data.sources import ChangedFile, DataError, Document, FileState, TextSource, matching
from swift.errors import SettingError, first_line
from swift.files import check_regular, open_regular

_KEPT_PARTS = 4
"""Number of file parts, such as row groups, that stay in memory."""
_ZSTD_PIECE = 1 << 16

_SCANNED = 1 << 24
_BLANK_BEGINS = list(b" \t\r" + BOM_UTF8[:1])
"""Possible first bytes of a blank line; a line that begins with any other byte is not blank."""


@runtime_checkable
class RecordSource(Protocol):
    """A source whose records are read by number; it must be the same on every machine, thread-safe and picklable."""

    def __len__(self) -> int:
        """Returns the number of records."""
        ...

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Reads a record."""
        ...

    def name(self, number: int) -> str:
        """Returns a record's name, the same on every machine; its hash decides between training and validation."""
        ...

    def place(self, number: int) -> str:
        """Returns where a record comes from, for messages: a file and a position in the file."""
        ...

    def digest(self) -> str | None:
        """Returns a digest that changes when any record changes, or None, so that nothing is cached in files."""
        ...


class Rows:
    """Records in memory.

    Args:
        records: mappings of fields.

    Raises:
        SettingError: ``records`` is empty.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]):
        if not len(records):
            raise SettingError("Rows.records", [], "must be at least one record")
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self._records[number]

    def name(self, number: int) -> str:
        """Returns the record's number, as ``record 5``."""
        return self.place(number)

    def place(self, number: int) -> str:
        """Returns the record's number, as ``record 5``."""
        return f"record {number}"

    def digest(self) -> str | None:
        """Returns a digest of all records, or None if a field is not text, bytes, a number, None or a plain array."""
        digest = hashlib.sha256()
        for record in self._records:
            for name, value in record.items():
                if isinstance(value, np.ndarray) and value.dtype != object:
                    encoded = f"{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
                elif isinstance(value, str | bytes | int | float | None):
                    encoded = repr(value).encode()
                else:
                    return None
                digest.update(f"{name!r} {len(encoded)} ".encode() + encoded)
            digest.update(b"end of record")
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Rows({len(self._records)} records)"


@dataclass(frozen=True)
class ChosenRecords:
    """A subset of a source's records, in the source's order.

    Args:
        source: source of all records.
        numbers: numbers of the chosen records, ascending.
    """

    source: RecordSource
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self.source[self.numbers[number]]

    def name(self, number: int) -> str:
        """Returns the name of a record."""
        return self.source.name(self.numbers[number])

    def place(self, number: int) -> str:
        """Returns where a record comes from."""
        return self.source.place(self.numbers[number])

    def digest(self) -> None:
        """Returns None, so that nothing derived from the subset is cached in files."""


@dataclass(frozen=True)
class RecordFile:
    """A file of records.

    Attributes:
        path: path, or address such as ``gs://bucket/name``.
        state: size and modification time of the file when it was found.
    """

    path: str
    state: FileState

    @property
    def is_remote(self) -> bool:
        """Whether the file is in remote storage."""
        return "://" in self.path

    def content(self) -> bytes:
        """Reads the whole file.

        Raises:
            DataError: the file cannot be read, or has changed since it was found.
        """
        try:
            if self.is_remote:
                content = epath.Path(self.path).read_bytes()
            else:
                with os.fdopen(open_regular(self.path), "rb") as file:
                    content = file.read()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error
        self.check()
        return content

    def check(self) -> None:
        """Raises ChangedFile if the file has changed since it was found, or is gone."""
        try:
            now = state_of(self.path)
        except OSError as error:
            raise ChangedFile(f"{self.path} cannot be read any more: {error.strerror or error}") from error
        if now != self.state:
            sizes = f"it had {self.state.num_bytes} bytes, and has {now.num_bytes}"
            raise ChangedFile(f"{self.path} has changed since the source was opened: {sizes}")


def state_of(path: str) -> FileState:
    """Returns the current state of a file; raises OSError if it is missing or not a regular file."""
    if "://" in path:
        remote_status = epath.Path(path).stat()
        return FileState(int(remote_status.length), int((remote_status.mtime or 0) * 1_000_000_000))
    status = check_regular(path)
    return FileState(status.st_size, status.st_mtime_ns)


def _find_files(setting: str, pattern: str) -> tuple[RecordFile, ...]:
    """Returns the files that match a pattern, sorted by name.

    Args:
        setting: name of the setting, for errors.
        pattern: pattern for ``glob``; may be remote, with wildcards in the last part: ``gs://bucket/part-*.jsonl``.

    Raises:
        SettingError: no file matches, or one is not a regular file.
    """
    try:
        if "://" in pattern:
            directory, _, name = pattern.rpartition("/")
            paths = sorted(str(path) for path in epath.Path(directory).glob(name))
        else:
            paths = sorted(path for path in matching(pattern) if not os.path.isdir(path))
        files = tuple(RecordFile(path, state_of(path)) for path in paths)
    except (OSError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(setting, pattern, f"cannot be read: {reason}") from error
    if not files:
        raise SettingError(setting, pattern, "no file matches")
    return files


def _uncompressed(file: RecordFile) -> bytes:
    """Reads a file and decompresses ``.gz`` and ``.zst``; ``.zst`` needs the extra ``zstd``.

    Raises:
        DataError: the file cannot be read, is damaged, or has changed.
        SettingError: the extra is not installed.
    """
    content = file.content()
    if not file.path.endswith((".gz", ".zst")):
        return content
    if not content:  # even without records, a compressed file has a header
        raise DataError(f"{file.path} is damaged: it has no bytes")
    try:
        # Not gzip.decompress: it copies the rest of the file for each member, and bgzip writes thousands of members.
        return _zstd(file)(content) if file.path.endswith(".zst") else gzip.GzipFile(fileobj=BytesIO(content)).read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file.path} is damaged: {error}") from error


def _zstd(file: RecordFile) -> Callable[[bytes], bytes]:
    try:
        import zstandard
    except ImportError:
        allowed = "needs the extra 'zstd': pip install 'swift-moe[zstd]'"
        raise SettingError("JsonLines.pattern", file.path, allowed) from None

    def decompress(content: bytes) -> bytes:
        decompressor, frame, decompressed = zstandard.ZstdDecompressor(), None, list[bytes]()
        try:
            # In small pieces: at the end of each frame, ``unused_data`` copies the rest of its input.
            for begin in range(0, len(content), _ZSTD_PIECE):
                piece = content[begin : begin + _ZSTD_PIECE]
                while piece:
                    frame = frame or decompressor.decompressobj()
                    decompressed.append(frame.decompress(piece))
                    piece = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
        except zstandard.ZstdError as error:
            raise OSError(error) from error
        if frame is not None:
            raise EOFError("its last frame has no end")
        return b"".join(decompressed)

    return decompress


class Parts:
    """A thread-safe LRU cache for parts of files, such as row groups or decompressed files.

    Args:
        read: reads a part that is not in the cache.
    """

    def __init__(self, read: Callable[[Any], Any]):
        self._read, self._cached, self._lock = read, OrderedDict[Any, Any](), threading.Lock()

    def __getitem__(self, part: Any) -> Any:
        with self._lock:
            if part in self._cached:
                self._cached.move_to_end(part)
                return self._cached[part]
        content = self._read(part)  # without the lock: threads may read the same part twice, but never wait
        with self._lock:
            self._cached[part] = content
            while len(self._cached) > _KEPT_PARTS:
                self._cached.popitem(last=False)
        return content


@dataclass(frozen=True)
class FileRecords(ABC):
    """Base class of sources that read all files matching a pattern, one file after another.

    Args:
        pattern: pattern of the files, see ``_find_files``.
    """

    pattern: str

    @functools.cached_property
    def files(self) -> tuple[RecordFile, ...]:
        """The files, sorted by name."""
        return _find_files(f"{type(self).__name__}.pattern", self.pattern)

    @functools.cached_property
    def _ends(self) -> Sequence[int]:
        return list(accumulate(self._num_records(place) for place in range(len(self.files))))

    @abstractmethod
    def _num_records(self, file: int) -> int: ...

    @abstractmethod
    def _record(self, file: int, number: int) -> Mapping[str, Any]: ...

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self._record(*self._located(number))

    def name(self, number: int) -> str:
        """Returns the path relative to the files' common directory, and the record's number in the file, from 1."""
        file, inside = self._located(number)
        return f"{self.files[file].path.removeprefix(self._root)}:{inside + 1}"

    @functools.cached_property
    def _root(self) -> str:
        return os.path.commonpath([os.path.dirname(file.path) for file in self.files]) + "/"

    def place(self, number: int) -> str:
        """Returns the path of the file, and the record's number in the file, from 1."""
        file, inside = self._located(number)
        return f"{self.files[file].path}:{inside + 1}"

    def digest(self) -> str | None:
        """Returns a digest of the settings and the files' paths, sizes and modification times."""
        lines = [type(self).__name__]
        lines += [f"{file.path!r} {file.state.num_bytes} {file.state.mtime_ns}" for file in self.files]
        settings = [getattr(self, f.name) for f in fields(self) if f.name != "pattern"]
        return hashlib.sha256("\n".join([*lines, repr(settings)]).encode(errors="surrogatepass")).hexdigest()

    def _located(self, number: int) -> tuple[int, int]:
        file = bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the settings, the files' states and their record counts; the receiving process opens the files."""
        cached = {name: self.__dict__[name] for name in ("files", "_ends") if name in self.__dict__}
        return {f.name: getattr(self, f.name) for f in fields(self)} | cached


@dataclass(frozen=True)
class Documents:
    """The documents of a text source such as ``TextFiles``, as records with the fields ``name`` and ``text``.

    Args:
        source: source of the texts.
    """

    source: TextSource

    @functools.cached_property
    def _listed(self) -> Sequence[Document]:
        return self.source.documents()

    @functools.cached_property
    def _files(self) -> Mapping[str, RecordFile]:
        """The documents' files by path, with their states; a missing file is reported when its document is read."""
        files = dict[str, RecordFile]()
        for document in self._listed:
            if document.path is not None:
                with suppress(OSError):
                    files[document.path] = RecordFile(document.path, state_of(document.path))
        return files

    def __len__(self) -> int:
        return len(self._listed)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Reads a document.

        Raises:
            ChangedFile: the document's file has changed since it was found.
        """
        document = self._listed[number]
        file = None if document.path is None else self._files.get(document.path)
        text = document.read()
        if file is not None:
            file.check()
        return {"name": document.name, "text": text}

    def name(self, number: int) -> str:
        """Returns the name of a document."""
        return self._listed[number].name

    def place(self, number: int) -> str:
        """Returns the path of a document, or its name if it has no path."""
        return self._listed[number].path or self._listed[number].name

    def digest(self) -> str | None:
        """Returns a digest of the documents' names and files, or None if a document is not in a file.

        A file is represented by its path, size and modification time.
        """
        lines = list[str]()
        for document in self._listed:
            file = None if document.path is None else self._files.get(document.path)
            if file is None:
                return None
            path = os.path.abspath(file.path)
            lines.append(f"{document.name!r} {path!r} {file.state.num_bytes} {file.state.mtime_ns}")
        return sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the source and the files' states; the receiving process lists the documents and checks the states."""
        cached = {"_files": self._files} if "_files" in self.__dict__ else {}
        return {f.name: getattr(self, f.name) for f in fields(self)} | cached


@dataclass(frozen=True)
class JsonLines(FileRecords):
    """JSON Lines files: each line is an object whose members are a record's fields; decompresses ``.gz`` and ``.zst``.

    Records of an uncompressed local file are read by byte offset. A compressed or remote file is held in memory while
    its records are read, so cache such records (see ``Resources``) before shuffling them. Blank lines are skipped, and
    a byte-order mark is removed.

    Args:
        pattern: pattern of the files, such as ``corpus/*.jsonl.gz``; may be remote.
    """

    def _num_records(self, file: int) -> int:
        return len(self._lines[file])

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        record_file, (begin, end) = self.files[file], self._lines[file][number]
        line = self._parts[file][begin:end] if self._is_whole(file) else self._read(file, int(begin), int(end))
        try:
            record = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:  # ValueError covers bytes that are not UTF-8, too
            raise DataError(f"{record_file.path}: record {number + 1} is not JSON: {first_line(error)}") from error
        if not isinstance(record, dict):
            raise DataError(f"{record_file.path}: record {number + 1} is not a JSON object")
        return record

    def _is_whole(self, file: int) -> bool:
        record_file = self.files[file]
        return record_file.is_remote or record_file.path.endswith((".gz", ".zst"))

    @functools.cached_property
    def _lines(self) -> list[np.ndarray]:
        """Start and end of each line that is not blank, in bytes, int64[num, 2] for each file."""
        return [self._scanned(file) for file in range(len(self.files))]

    def _scanned(self, file: int) -> np.ndarray:
        if self._is_whole(file):
            content = self._parts[file]
            return _lines_of(lambda begin, end: content[begin:end], len(content))
        return _lines_of(lambda begin, end: self._read(file, begin, end), self.files[file].state.num_bytes)

    @functools.cached_property
    def _parts(self) -> Parts:
        return Parts(lambda file: _uncompressed(self.files[file]))

    @functools.cached_property
    def _opened(self) -> dict[int, int]:
        return {}

    def _read(self, file: int, begin: int, end: int) -> bytes:
        record_file = self.files[file]
        try:
            if file not in self._opened:
                fd = open_regular(record_file.path)
                if self._opened.setdefault(file, fd) == fd:
                    weakref.finalize(self._opened_by, os.close, fd)
                else:  # another thread was first
                    os.close(fd)
            content = os.pread(self._opened[file], end - begin, begin)
        except OSError as error:
            raise DataError(f"{record_file.path} cannot be read: {error.strerror}") from error
        record_file.check()
        return content

    @functools.cached_property
    def _opened_by(self) -> "_Owner":
        return _Owner()


class _Owner:
    """Owner of file descriptors, which are closed when it is garbage-collected."""


def _lines_of(read: Callable[[int, int], bytes], size: int, piece_bytes: int = _SCANNED) -> np.ndarray:
    """Returns the start and end of all lines that are not blank, in bytes, int64[num, 2].

    Args:
        read: returns the bytes between two positions.
        size: size of the file in bytes.
        piece_bytes: number of bytes to read at once, which bounds the memory.
    """
    # ``starts`` are line starts that no piece has covered yet; ``undecided`` are suspected blank lines whose end is in
    # a later piece. Only lines that begin with white space or a byte-order mark are examined in Python.
    starts, breaks, begun = np.zeros(1, np.int64), list[np.ndarray](), list[np.ndarray]()
    blank, undecided = list[int](), list[int]()
    for begin in range(0, size, piece_bytes):
        content = read(begin, min(size, begin + piece_bytes))
        piece = np.frombuffer(content, np.uint8)
        breaks.append(np.flatnonzero(piece == ord("\n")) + begin)
        starts = np.concatenate([starts, breaks[-1] + 1])
        is_here = starts < begin + len(piece)
        begun.append(starts[is_here])
        starts = starts[~is_here]
        suspects = begun[-1][np.isin(piece[begun[-1] - begin], _BLANK_BEGINS)]
        num_ended = int(np.searchsorted(suspects, breaks[-1][-1])) if len(breaks[-1]) else 0
        undecided += suspects[num_ended:].tolist()
        ends = breaks[-1][np.searchsorted(breaks[-1], suspects[:num_ended])]
        for start, end in zip(suspects[:num_ended].tolist(), ends.tolist(), strict=True):
            if _is_blank(content[start - begin : end - begin]):
                blank.append(start)
    if not begun:
        return np.zeros((0, 2), np.int64)
    begins_L = np.concatenate(begun)
    ends_L = np.append(np.concatenate(breaks), size)[: len(begins_L)]
    for place in np.searchsorted(begins_L, undecided).tolist():
        if _is_blank(read(int(begins_L[place]), int(ends_L[place]))):
            blank.append(int(begins_L[place]))
    is_line_L = (ends_L > begins_L) & ~np.isin(begins_L, blank)
    return np.stack([begins_L, ends_L], axis=1)[is_line_L]


def _is_blank(line: bytes) -> bool:
    """Whether a line is only white space, with or without a byte-order mark before it."""
    return not line.removeprefix(BOM_UTF8).strip()


@dataclass(frozen=True)
class ArrayRecords(FileRecords):
    """ArrayRecord files, read by Grain; each record has a single field, ``record``, with its bytes.

    Args:
        pattern: pattern of the files, such as ``corpus/*.array_record``.
    """

    def _num_records(self, file: int) -> int:
        return len(self._sources[file])

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        record_file = self.files[file]
        record_file.check()
        try:
            return {"record": self._sources[file][number]}
        except Exception as error:  # the library raises many types
            raise DataError(f"{record_file.path}: record {number + 1} cannot be read: {first_line(error)}") from error

    @functools.cached_property
    def _sources(self) -> list[Any]:
        return [self._opened(file.path) for file in self.files]

    def _opened(self, path: str) -> Any:
        try:
            source = grain.sources.ArrayRecordDataSource([path])
            len(source)
        except Exception as error:  # the library raises many types
            raise DataError(f"{path} is not an ArrayRecord file: {first_line(error)}") from error
        return source
