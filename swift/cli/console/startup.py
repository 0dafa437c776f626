"""The first seconds of a command, on a terminal: a line that is redrawn until the command itself prints something."""

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self, TextIO

_PERIOD_S = 0.2
_CLEAR = "\r\x1b[2K"


class Startup:
    """Shows on stderr what a command is waiting for, from before JAX is imported; a context manager.

    The line is erased before anything else is printed, on stdout or stderr, and at the end of the block: so a mistake
    still gives one line. Where stderr is not a terminal nothing is shown.

    Args:
        text: what the command does, such as ``swift train: starting``.
    """

    def __init__(self, text: str):
        self._text, self._begun = text, time.monotonic()
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._streams: dict[str, TextIO] = {}

    def __enter__(self) -> Self:
        if sys.stderr is not None and sys.stderr.isatty():  # None where it is closed
            self._terminal = sys.stderr
            for name in ("stdout", "stderr"):
                self._streams[name] = getattr(sys, name)
                setattr(sys, name, _Watched(self._streams[name], self.end))
            self._draw()
            threading.Thread(target=self._redraw, name="startup", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Erases the line, and leaves the terminal to others; a second call does nothing."""
        with self._lock:
            if not self._streams:
                return
            self._is_over.set()
            for name, stream in self._streams.items():
                if isinstance(getattr(sys, name), _Watched):
                    setattr(sys, name, stream)
            self._streams = {}
            self._terminal.write(_CLEAR)
            self._terminal.flush()

    def _redraw(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            with self._lock:
                if not self._is_over.is_set():
                    self._draw()

    def _draw(self) -> None:
        self._terminal.write(f"{_CLEAR}{self._text} ({time.monotonic() - self._begun:.0f} s)")
        self._terminal.flush()


class _Watched:
    """A stream that calls a function before it is written to."""

    def __init__(self, stream: TextIO, before: Any):
        self._stream, self._before = stream, before

    def write(self, text: str) -> int:
        self._before()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
