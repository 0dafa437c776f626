"""The terminal of a run: a pipe whose lines go to a file, as in ``swift launch ... 2>&1 | tee FILE``."""

import fcntl
import os
import select
import threading
import time
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.05
_LAST_S = 5.0
_SMALL = 4096
UNHEARD = "(nobody read it)"
"""Output of a run whose terminal was closed."""


class Terminal:
    """Reads what a run says, and writes it to a file, in a thread.

    Attributes:
        writer: end of the pipe for the run, which this process keeps too, to fill the pipe.
        is_closed: whether nothing is read any more.

    Args:
        path: file to which lines are appended.
    """

    def __init__(self, path: Path):
        self._path, self.is_closed = path, False
        self._reader, self.writer = os.pipe()
        fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, _SMALL)
        self._reads = threading.Event()
        self._reads.set()
        threading.Thread(target=self._relay, name="terminal", daemon=True).start()

    def stand_still(self) -> None:
        """Reads no more for a while, and fills the pipe, so that the next write to it would wait."""
        if self.is_closed:
            return
        self._reads.clear()
        time.sleep(2 * _POLL_S)
        filling = os.open(f"/proc/self/fd/{self.writer}", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(filling, b"\n")
        os.close(filling)

    def go_on(self) -> None:
        """Reads on."""
        self._reads.set()

    def close(self) -> None:
        """Ends, as ``head`` does: writes to the pipe fail from now on."""
        if not self.is_closed:
            self.is_closed = True
            self._reads.set()
            os.close(self.writer)

    def _settle(self) -> None:
        """Waits until all that was said is in the file."""
        deadline = time.monotonic() + _LAST_S
        while not self.is_closed and self._has_more(0.0) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    @property
    def said(self) -> str:
        """All that the run has said, once it is in the file."""
        if self.is_closed:
            return UNHEARD
        self._settle()
        return self._path.read_text(errors="replace")

    def _has_more(self, limit_s: float) -> bool:
        return bool(select.select([self._reader], [], [], limit_s)[0])

    def _relay(self) -> None:
        with self._path.open("ab", buffering=0) as file:
            while not self.is_closed:
                self._reads.wait()
                if self._has_more(_POLL_S):
                    piece = os.read(self._reader, _SMALL)
                    if not piece:
                        break
                    file.write(piece)
        os.close(self._reader)
