"""Follows the files of a run while the run writes them, and its lease: each read returns only what is new.

Nothing is locked or written, and nothing waits. A file may be missing at first, end in half a line, be cut when a run
is resumed, or be replaced by another file.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from swift.runlog.lease import (
    WATCH_S,
    LeaseFile,
    LeaseObservation,
    Owner,
    Verdict,
    judge,
    process_is_there,
    read_leases,
    this_process,
)

_MARK_BYTES = 128
_NO_FILE = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True)
class NewLines:
    """The outcome of a read.

    Attributes:
        lines: new complete lines in order, without their line feeds.
        is_restarted: whether the lines read earlier are no longer what the file begins with; ``lines`` then begin at
            the start of the file.
        bytes_left: bytes that are not read yet; includes an incomplete last line.
    """

    lines: list[bytes]
    is_restarted: bool
    bytes_left: int


class FollowedLines:
    """Reads the lines that are appended to a file.

    The file is opened for each read, so that a network file system asks its server for the current content.

    Args:
        path: path of the file; may be missing.
        max_bytes: bytes to read at once; more only for a line that is longer.
        most_in_line: bytes of the longest line that is read; a longer one is an empty line.

    Attributes:
        offset: bytes that are read.
    """

    def __init__(self, path: Path, max_bytes: int = 2**22, most_in_line: int = 2**28):
        self._path, self._max_bytes, self._most_in_line = path, max_bytes, most_in_line
        self._is_too_long = False  # whether the line that is being read is
        self.offset = 0
        self._file: tuple[int, int] | None = None
        self._mark = b""  # the last bytes that were read: a run that was resumed has others there

    def read(self) -> NewLines:
        """Reads the next lines, at most about ``max_bytes``.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for a writer.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return NewLines([], self._restart(), 0)
        try:
            return self._read(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int) -> NewLines:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(self._path))
        mark = os.pread(descriptor, len(self._mark), self.offset - len(self._mark))
        is_same = self._file in (None, (status.st_dev, status.st_ino)) and mark == self._mark
        is_restarted = not is_same and self._restart()
        self._file = status.st_dev, status.st_ino
        content = os.pread(descriptor, self._max_bytes, self.offset)
        end = content.rfind(b"\n") + 1
        while not end and self.offset + len(content) < status.st_size:
            more = os.pread(descriptor, max(self._max_bytes, len(content)), self.offset + len(content))
            if not more:  # the file has been cut in the meantime
                break
            found = more.rfind(b"\n") + 1
            end = found and len(content) + found
            content += more
            if not end and len(content) > self._most_in_line:
                self._mark, self._is_too_long = content[-_MARK_BYTES:], True
                self.offset += len(content)
                content = b""
        self._mark = (self._mark + content[max(0, end - _MARK_BYTES) : end])[-_MARK_BYTES:]
        self.offset += end
        lines = content[:end].split(b"\n")[:-1]
        if lines and self._is_too_long:
            lines[0], self._is_too_long = b"", False
        return NewLines(lines, is_restarted, max(0, status.st_size - self.offset))

    def _restart(self) -> bool:
        """Goes back to the start of the file; returns whether lines had been read."""
        had_lines, self.offset, self._file, self._mark = self.offset > 0, 0, None, b""
        self._is_too_long = False
        return had_lines


class LeaseWatch:
    """Watches whether a run directory has a living owner; takes nothing, writes nothing and never waits.

    Args:
        run_dir: run directory; may be missing.
    """

    def __init__(self, run_dir: Path):
        self._run_dir, self._here = run_dir, this_process().place
        self._lease: LeaseFile | None = None
        self._seen, self._age_s, self._has_beaten = 0.0, 0.0, False  # of the last heartbeat that was seen

    def look(self, time: float, wall_time: float) -> tuple[Verdict, Owner | None]:
        """Reads the newest lease, and judges by it and by earlier looks.

        Args:
            time: current time in seconds, on a clock that is never set.
            wall_time: current time in seconds since 1970.

        Returns:
            The verdict, ``DEAD`` if nobody owns the directory; and the owner, None if there is none or it is unknown.

        Raises:
            SettingError: the directory cannot be read.
        """
        lease = next(reversed(read_leases(self._run_dir)), None)
        if lease is None:
            self._lease = None
            return Verdict.DEAD, None
        before, self._lease = self._lease, lease
        if before is None or before.path != lease.path:
            self._seen, self._age_s, self._has_beaten = time, wall_time - lease.beat_ns / 1e9, False
        elif before.beat_ns != lease.beat_ns:
            self._seen, self._age_s, self._has_beaten = time, 0.0, True
        owner, silent_s = lease.owner, time - self._seen
        is_there = process_is_there(owner) if owner is not None and owner.place == self._here else None
        has_beaten = self._has_beaten and silent_s < WATCH_S
        return judge(owner, self._here, LeaseObservation(is_there, has_beaten, silent_s, self._age_s)), owner
