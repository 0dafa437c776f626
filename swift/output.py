"""Output that neither ends nor stops a run: what a terminal, a pipe or a full disk does not take is dropped.

A command that trains for days writes to whatever its user has left it: a pipe to ``head``, a paused ``less``, a hung
ssh, a file on a full disk. A thread writes there, so that no caller waits for a reader or sees an error.
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
"""Bytes that wait for a reader; more are dropped, whole writes at a time."""
_CHUNK_BYTES = 4096
"""Linux lets a pipe be polled as writable while a page is free, so that a write of this size does not block."""
_PATIENCE_S = 0.1
_LAST_S = 2.0


class _PatientFile(io.RawIOBase):
    """A file descriptor to which writes never block and never fail.

    While its reader keeps up, ``flush`` returns once all is written, so that lines of two streams stay in order. Once a
    flush has waited in vain, the next ones do not wait until the reader has caught up.

    Args:
        descriptor: where to write; it is left open.
        most_bytes: bytes that may wait.
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
        """See ``io.IOBase``; False where the descriptor is closed, too."""
        with suppress(OSError):
            return os.isatty(self._descriptor)
        return False

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Takes bytes to be written, or drops them if too many wait."""
        piece = bytes(content)
        if self._is_ended:
            write_at_once(self._descriptor, piece)
            return len(piece)
        if self._pid != os.getpid():  # a fork, which has no threads of its parent
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
        """Waits until all is written, but no longer than a reader that keeps up would need."""
        if not self._is_ended and self._pid == os.getpid():
            self.settle(0.0 if self._is_behind else _PATIENCE_S)

    def settle(self, limit_s: float) -> bool:
        """Waits until all is written, for so many seconds at most; returns whether it is."""
        with self._changed:
            is_written = self._changed.wait_for(lambda: not self._size, limit_s)
            self._is_behind = not is_written
        return is_written

    def end(self, limit_s: float) -> bool:
        """Waits until all is written, for so many seconds at most, and ends the thread; returns whether it is written.

        What is written afterwards takes no lock, which a thread could hold that Python stops as it exits.
        """
        is_written = self._pid != os.getpid() or self.settle(limit_s)
        self._is_ended = True
        if is_written and self._pid == os.getpid():
            with self._changed:
                self._changed.notify_all()
        return is_written

    def _work(self) -> None:
        """Writes what waits, until the end, in the thread."""
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
        """Writes a piece once its reader has room for it; what cannot be written is dropped."""
        with suppress(OSError):
            while piece:
                _select_writable(self._descriptor, None)
                try:
                    piece = piece[os.write(self._descriptor, piece[:_CHUNK_BYTES]) :]
                except BlockingIOError:  # somebody else was quicker
                    time.sleep(_PATIENCE_S)


def _select_writable(descriptor: int, limit_s: float | None) -> bool:
    """Waits until a descriptor takes a small write without blocking; returns whether it does.

    Args:
        descriptor: of a file, a pipe or a terminal.
        limit_s: seconds to wait at most; None: for ever.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if limit_s is None else limit_s * 1000))


def write_at_once(descriptor: int, content: bytes) -> None:
    """Writes what can be written without blocking or failing; for the last words of a process."""
    with suppress(OSError):
        while content and _select_writable(descriptor, 0.0):
            content = content[os.write(descriptor, content[:_CHUNK_BYTES]) :]


def patient_stream(descriptor: int, encoding: str = "utf-8") -> TextIO:
    """Opens a text stream on a descriptor to which writes never block and never fail."""
    file: Any = _PatientFile(descriptor)  # of a buffer, the stream needs only what a raw file has, too
    return io.TextIOWrapper(file, encoding=encoding, errors="backslashreplace", line_buffering=True)


def protect(names: Sequence[str]) -> None:
    """Makes standard streams of this process patient: ``"stdout"``, ``"stderr"`` or both.

    Args:
        names: streams to replace.
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
    """Opens standard descriptors that the caller has closed, as in ``2>&-``.

    Otherwise the first file that is opened gets that number, and libraries in C would write their lines into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno == errno.EBADF:
                opened = os.open(os.devnull, os.O_RDWR)  # takes the smallest number that is free
                os.set_inheritable(opened, True)  # for children, as any standard descriptor
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # to which `print` would prefer stdout
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def finish(limit_s: float = _LAST_S) -> None:
    """Waits until the patient streams are written, for so many seconds at most, before the process ends."""
    until = time.monotonic() + limit_s
    for stream in (sys.stderr, sys.stdout):
        if stream is not None:
            end_patient(stream, max(0.0, until - time.monotonic()))


def end_patient(stream: TextIO, limit_s: float) -> bool:
    """Waits until a patient stream is written, for so many seconds at most; returns whether it is. Leaves it open."""
    file = getattr(stream, "buffer", None)
    if not isinstance(file, _PatientFile):
        return True
    stream.flush()
    return file.end(limit_s)


def _open_without_blocking(descriptor: int) -> None:
    """Has libraries in C, which write past Python, lose lines rather than wait where nobody reads a pipe or a terminal.

    The descriptor gets an open file description of its own, so that other processes with the same terminal keep theirs.
    Where that cannot be had, as of a socket or another user's terminal, it stays as it is.
    """
    with suppress(OSError):
        if os.isatty(descriptor) or stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            opened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(opened, descriptor)
            os.close(opened)
