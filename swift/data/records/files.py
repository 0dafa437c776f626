"""Files of records, local or remote: found by a pattern, read with care, told from changed ones."""

import functools
import gzip
import hashlib
import os
import threading
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from itertools import accumulate
from typing import Any

from etils import epath

from swift.data.files import ChangedFile, DataError, FileState, matching
from swift.errors import SettingError
from swift.files import check_regular, open_regular

_KEPT_PARTS = 4
"""Parts of files, such as row groups, that stay in memory."""
_ZSTD_PIECE = 1 << 16


@dataclass(frozen=True)
class RecordFile:
    """A file of records.

    Attributes:
        path: path, or address such as ``gs://bucket/name``.
        state: its size and time when it was found.
    """

    path: str
    state: FileState

    @property
    def is_remote(self) -> bool:
        """Whether it is not a file of this machine."""
        return "://" in self.path

    def content(self) -> bytes:
        """Reads the file.

        Raises:
            DataError: it cannot be read, or has changed since it was found.
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
        """Raises ChangedFile unless the file is as it was found."""
        try:
            now = state_of(self.path)
        except OSError as error:
            raise ChangedFile(f"{self.path} cannot be read any more: {error.strerror or error}") from error
        if now != self.state:
            sizes = f"it had {self.state.num_bytes} bytes, and has {now.num_bytes}"
            raise ChangedFile(f"{self.path} has changed since the source was opened: {sizes}")


def state_of(path: str) -> FileState:
    """Returns the present state of a file; raises OSError if it is gone, or not a regular one."""
    if "://" in path:
        found = epath.Path(path).stat()
        return FileState(int(found.length), int((found.mtime or 0) * 1_000_000_000))
    status = check_regular(path)
    return FileState(status.st_size, status.st_mtime_ns)


def find_files(setting: str, pattern: str) -> tuple[RecordFile, ...]:
    """Finds the files of a pattern, by name.

    Args:
        setting: name of the setting, for errors.
        pattern: pattern for ``glob``, or one of a remote directory, such as ``gs://bucket/part-*.jsonl``.

    Raises:
        SettingError: no file matches, or one is not a regular file.
    """
    try:
        if "://" in pattern:
            directory, _, name = pattern.rpartition("/")
            paths = sorted(str(path) for path in epath.Path(directory).glob(name))
        else:
            paths = sorted(path for path in matching(pattern) if not os.path.isdir(path))
        found = tuple(RecordFile(path, state_of(path)) for path in paths)
    except (OSError, ValueError, ImportError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingError(setting, pattern, f"cannot be read: {why}") from error
    if not found:
        raise SettingError(setting, pattern, "no file matches")
    return found


def uncompressed(file: RecordFile) -> bytes:
    """Reads a file, and undoes ``.gz`` and ``.zst``; for the latter the extra ``zstd`` is needed.

    Raises:
        DataError: it cannot be read, is damaged, or has changed.
        SettingError: the extra is not installed.
    """
    content = file.content()
    if not file.path.endswith((".gz", ".zst")):
        return content
    if not content:  # a compressed file of no records has a head
        raise DataError(f"{file.path} is damaged: it has no bytes")
    try:
        # Not gzip.decompress: it copies the rest of the file for each member, and bgzip writes them by the thousand.
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
        decompressor, frame, made = zstandard.ZstdDecompressor(), None, list[bytes]()
        try:
            # In small pieces, since what follows a frame is copied.
            for begin in range(0, len(content), _ZSTD_PIECE):
                piece = content[begin : begin + _ZSTD_PIECE]
                while piece:
                    frame = frame or decompressor.decompressobj()
                    made.append(frame.decompress(piece))
                    piece = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
        except zstandard.ZstdError as error:
            raise OSError(error) from error
        if frame is not None:
            raise EOFError("its last frame has no end")
        return b"".join(made)

    return decompress


class Parts:
    """The newest parts of files that were read, such as an uncompressed file; threads may share it.

    Args:
        read: function that reads a part.
    """

    def __init__(self, read: Callable[[Any], Any]):
        self._read, self._held, self._lock = read, OrderedDict[Any, Any](), threading.Lock()

    def __getitem__(self, part: Any) -> Any:
        with self._lock:
            if part in self._held:
                self._held.move_to_end(part)
                return self._held[part]
        made = self._read(part)
        with self._lock:
            self._held[part] = made
            while len(self._held) > _KEPT_PARTS:
                self._held.popitem(last=False)
        return made


@dataclass(frozen=True)
class FileRecords(ABC):
    """Records of the files of a pattern, one file after the other; a base for sources.

    Args:
        pattern: pattern of the files, see ``find_files``.
    """

    pattern: str

    @functools.cached_property
    def files(self) -> tuple[RecordFile, ...]:
        """The files, by name."""
        return find_files(f"{type(self).__name__}.pattern", self.pattern)

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
        """Returns the path below the directory that all files share, and the number of a record, from 1."""
        file, inside = self._located(number)
        return f"{self.files[file].path.removeprefix(self._root)}:{inside + 1}"

    @functools.cached_property
    def _root(self) -> str:
        return os.path.commonpath([os.path.dirname(one.path) for one in self.files]) + "/"

    def place(self, number: int) -> str:
        """Returns the file and the number of a record in it, from 1."""
        file, inside = self._located(number)
        return f"{self.files[file].path}:{inside + 1}"

    def digest(self) -> str | None:
        """Returns a digest of names, sizes and times of the files."""
        said = [type(self).__name__]
        said += [f"{one.path!r} {one.state.num_bytes} {one.state.mtime_ns}" for one in self.files]
        settings = [getattr(self, one.name) for one in fields(self) if one.name != "pattern"]
        return hashlib.sha256("\n".join([*said, repr(settings)]).encode(errors="surrogatepass")).hexdigest()

    def _located(self, number: int) -> tuple[int, int]:
        file = bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the settings, and what was found of the files: another process opens them itself."""
        found = {name: self.__dict__[name] for name in ("files", "_ends") if name in self.__dict__}
        return {one.name: getattr(self, one.name) for one in fields(self)} | found
