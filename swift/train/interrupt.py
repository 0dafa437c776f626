"""Ctrl-C between iterations: the exception that Python raises at any point crashes XLA, or gets lost in a callback."""

import signal
import threading
from types import TracebackType
from typing import Any, Self


class Interrupt:
    """While it is entered, Ctrl-C is only noted, for the loop to stop where it is safe; a second one kills.

    Args:
        *also: signals that are taken like it.
    """

    def __init__(self, *also: signal.Signals) -> None:
        self.requested = False
        self._signals, self._previous = (signal.SIGINT, *also), dict[signal.Signals, Any]()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows no other to set handlers
            self._previous = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        self.requested = True
        signal.signal(number, signal.SIG_DFL)
