"""A terminal on which a display is redrawn in place while libraries write to it. No JAX here."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from swift.output import end_patient, patient_stream

_LAST_S = 1.0


class Terminal:
    """A display that is redrawn in place below permanent lines; where stderr is not a terminal, only the lines.

    A context manager, which restores the terminal however the block is left.

    Attributes:
        is_live: whether there is a display.
        is_transient: whether the display disappears at the end of the block; otherwise its last state stays.

    Args:
        draw: function that draws the display.
        console: console to write to; stderr unless given.
        redraws_per_s: times that the display is redrawn per second.
        catches_stderr: whether to print above the display, line by line, what libraries write directly to file
            descriptor 2. Not for a process that may abort: its last lines would be lost.
    """

    def __init__(
        self,
        draw: Callable[[], RenderableType],
        console: Console | None = None,
        redraws_per_s: float = 4,
        *,
        catches_stderr: bool = False,
    ):
        self._draw, self._rate = draw, redraws_per_s
        self._catches = catches_stderr
        self._console = console or Console(stderr=True)
        self.is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self.is_transient = False
        self._live: Live | None = None
        self._caught: _CaughtStderr | None = None

    def print(self, text: str) -> None:
        """Prints a permanent line."""
        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def __enter__(self) -> Self:
        if not self.is_live:
            return self
        if self._catches:
            with suppress(OSError):  # stderr is closed
                self._caught = _CaughtStderr(self.print)
                # Rich looks up the width of the standard streams, but stderr is no longer a terminal.
                width = None if os.isatty(0) or os.isatty(1) else self._console.width
                self._console = Console(file=self._caught.original, force_terminal=True, width=width)
                self._caught.begin()
        # With stdout redirected, its text would go to stderr.
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            redirect_stdout=False,
            refresh_per_second=self._rate,
        )
        self._live.start()
        self._console.show_cursor()  # a process that is killed could not restore a hidden one
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            if self._caught:
                self._caught.end()  # first, so that its last lines are above the display
            self._live.transient = self.is_transient
            self._live.stop()
            self._live = None
        if self._caught:
            self._console = Console(stderr=True)
            self._caught.close()
            self._caught = None


class _CaughtStderr:
    """File descriptor 2, redirected so that its lines go to a function.

    Attributes:
        original: stream to which stderr went before.
    """

    def __init__(self, tell: Callable[[str], None]):
        sys.stderr.flush()
        self.original = patient_stream(os.dup(2))
        self._tell = tell

    def begin(self) -> None:
        """Redirects what is written from now on; the function itself must no longer write to stderr."""
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        self._thread = threading.Thread(target=self._follow, args=(reader,), name="stderr", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Restores stderr, once all its lines have been shown."""
        os.dup2(self.original.fileno(), 2)  # closes the last writer, so that the thread ends
        self._thread.join(timeout=1)  # a child of this process may hold a writer

    def close(self) -> None:
        """Closes the original stream, unless it still waits for a reader."""
        if end_patient(self.original, _LAST_S):
            os.close(self.original.fileno())

    def _follow(self, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._tell(line.rstrip("\n"))
