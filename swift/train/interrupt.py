"""Ctrl-C between iterations: the exception that Python raises at any point crashes XLA, or gets lost in a callback."""

import signal
import threading
from types import TracebackType
from typing import Any, Self


class Interrupt:
    """While it is entered, Ctrl-C is only noted, for the loop to stop where it is safe; a second one kills."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows no other to set handlers
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, *_: Any) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
