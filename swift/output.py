"""Output that never blocks or ends a run: whatever a terminal, a pipe or a full disk does not accept is dropped.

The output of a command that trains for days may go to a pipe to ``head``, a paused ``less``, a hung ssh session or a
file on a full disk. A thread does the writing, so callers do not wait for a stalled reader, and see no errors.
"""

import errno
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

_MOST_BYTES = 2**18
"""Maximum number of bytes that wait for a reader; beyond that, whole writes are dropped."""
_CHUNK_BYTES = 4096
"""Linux reports a pipe as writable only while a page is free, so a write of this size does not block."""
_PATIENCE_S = 0.1
_LAST_S = 2.0


class _PatientFile(io.RawIOBase):
    """A raw file on a descriptor; writing to it never blocks and never fails.

    As long as the reader keeps up, ``flush`` returns once everything is written, so that the lines of two streams stay
    in order. After a flush has timed out, later ones return immediately until the reader has caught up.

    Args:
        descriptor: file descriptor to write to; it is never closed.
        most_bytes: maximum number of bytes that may wait to be written.
    """

    def __init__(self, descriptor: int, most_bytes: int = _MOST_BYTES):
        self._descriptor, self._most = descriptor, most_bytes
        self._is_ended = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._pieces, self._size, self._dropped = deque[bytes](), 0, 0
        self._changed, self._is_behind = threading.Condition(), False
        threading.Thread(target=self._work, name=f"output {self._descriptor}", daemon=True).start()

    def writable(self) -> bool:
        """See ``io.IOBase``."""
        return True

    def fileno(self) -> int:
        """See ``io.IOBase``."""
        return self._descriptor

    def isatty(self) -> bool:
        """See ``io.IOBase``; also False if the descriptor is closed."""
        with suppress(OSError):
            return os.isatty(self._descriptor)
        return False

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Queues bytes for writing, or drops them if too many are already waiting."""
        piece = bytes(content)
        if self._is_ended:
            write_at_once(self._descriptor, piece)
            return len(piece)
        if self._pid != os.getpid():  # this process was forked, and does not have its parent's threads
            self._begin()
        with self._changed:
            if self._size + len(piece) > self._most:
                self._dropped += piece.count(b"\n")
            elif piece:
                self._pieces.append(piece)
                self._size += len(piece)
                self._changed.notify_all()
        return len(piece)

    def flush(self) -> None:
        """Waits until everything is written, but at most 0.1 s, and not at all while the reader is behind."""
        if not self._is_ended and self._pid == os.getpid():
            self.settle(0.0 if self._is_behind else _PATIENCE_S)

    def settle(self, limit_s: float) -> bool:
        """Waits up to ``limit_s`` seconds until everything is written; returns whether it is."""
        with self._changed:
            is_written = self._changed.wait_for(lambda: not self._size, limit_s)
            self._is_behind = not is_written
        return is_written

    def end(self, limit_s: float) -> bool:
        """Waits as ``settle`` does, then stops the thread; returns whether everything is written.

        Later writes do not take the lock: Python stops threads when it exits, and a stopped thread might hold it.
        """
        is_written = self._pid != os.getpid() or self.settle(limit_s)
        self._is_ended = True
        if is_written and self._pid == os.getpid():
            with self._changed:
                self._changed.notify_all()
        return is_written

    def _work(self) -> None:
        """Writes queued pieces until ``end`` is called; runs in the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._is_ended)
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
            self._put(piece)
            with self._changed:
                self._size -= len(piece)
                if not self._size:
                    self._is_behind, dropped, self._dropped = False, self._dropped, 0
                    if dropped:
                        notice = f"swift: {dropped:,} lines were not shown: nobody read them\n".encode()
                        self._pieces.append(notice)
                        self._size += len(notice)
                    self._changed.notify_all()

    def _put(self, piece: bytes) -> None:
        """Writes a piece as the reader makes room; drops the rest of it on an error."""
        with suppress(OSError):
            while piece:
                _select_writable(self._descriptor, None)
                try:
                    piece = piece[os.write(self._descriptor, piece[:_CHUNK_BYTES]) :]
                except BlockingIOError:  # another process has filled the pipe again
                    time.sleep(_PATIENCE_S)


def _select_writable(descriptor: int, limit_s: float | None) -> bool:
    """Waits until a small write to a descriptor would not block; returns False if the time limit passes first.

    Args:
        descriptor: descriptor of a file, a pipe or a terminal.
        limit_s: maximum number of seconds to wait, or None for no limit.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if limit_s is None else limit_s * 1000))


def write_at_once(descriptor: int, content: bytes) -> None:
    """Writes as much as possible without blocking or failing; for the final messages of an exiting process."""
    with suppress(OSError):
        while content and _select_writable(descriptor, 0.0):
            content = content[os.write(descriptor, content[:_CHUNK_BYTES]) :]


def patient_stream(descriptor: int, encoding: str = "utf-8") -> TextIO:
    """Opens a text stream on a descriptor; writing to it never blocks and never fails."""
    file: Any = _PatientFile(descriptor)  # a raw file has all methods of a buffer that the stream needs
    return io.TextIOWrapper(file, encoding=encoding, errors="backslashreplace", line_buffering=True)


def protect(names: Sequence[str]) -> None:
    """Replaces standard streams of this process by ones that never block and never fail, see ``patient_stream``.

    Args:
        names: streams to replace: ``"stdout"``, ``"stderr"`` or both.
    """
    for name in names:
        stream = getattr(sys, name)
        if stream is None or isinstance(getattr(stream, "buffer", None), _PatientFile):
            continue
        with suppress(OSError, ValueError):
            stream.flush()
        descriptor = stream.fileno()
        _open_without_blocking(descriptor)
        setattr(sys, name, patient_stream(descriptor, stream.encoding))


def open_closed() -> None:
    """Opens standard descriptors that the parent process closed, as with ``2>&-``.

    Otherwise the next file opened would get such a number, and C libraries would write their messages into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno == errno.EBADF:
                opened = os.open(os.devnull, os.O_RDWR)  # gets the smallest free number, which is ``descriptor``
                os.set_inheritable(opened, True)  # children inherit standard descriptors
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # ``print(..., file=None)`` would write to stdout
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def finish(limit_s: float = _LAST_S) -> None:
    """Waits up to ``limit_s`` seconds for all output of the patient streams; call it before the process exits."""
    until = time.monotonic() + limit_s
    for stream in (sys.stderr, sys.stdout):
        if stream is not None:
            end_patient(stream, max(0.0, until - time.monotonic()))


def end_patient(stream: TextIO, limit_s: float) -> bool:
    """Waits up to ``limit_s`` seconds for the output of a patient stream; returns whether it is written.

    The stream stays open; later writes drop what the reader does not accept at once.
    """
    file = getattr(stream, "buffer", None)
    if not isinstance(file, _PatientFile):
        return True
    stream.flush()
    return file.end(limit_s)


def _open_without_blocking(descriptor: int) -> None:
    """Makes a pipe or terminal non-blocking, for C libraries that write to the descriptor directly.

    They then lose lines instead of waiting for a reader. The descriptor gets a separate open file description, so that
    other processes on the same terminal are not affected. Where that is not possible, as for a socket or another user's
    terminal, the descriptor is left unchanged.
    """
    with suppress(OSError):
        if os.isatty(descriptor) or stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            opened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(opened, descriptor)
            os.close(opened)
