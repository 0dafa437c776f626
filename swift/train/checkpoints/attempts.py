"""Attempts to write a checkpoint, repeated after pauses by the thread that writes it."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event
from typing import TypeVar

from swift.checkpoint.storage.writer import RETRY_PAUSES_S
from swift.errors import RunError

_Result = TypeVar("_Result")


class Attempts:
    """Attempts of a thread, whose failures another one reports."""

    def __init__(self) -> None:
        self._is_hurried = Event()
        self._failures: SimpleQueue[str] = SimpleQueue()

    def begin(self) -> None:
        """Begins anew: nobody waits for the result."""
        self._is_hurried.clear()

    def hurry(self) -> None:
        """Has a failed attempt repeated once, immediately."""
        self._is_hurried.set()

    def run(self, act: Callable[[], _Result]) -> _Result:
        """Returns what a function does, which is tried again after pauses, see ``RETRY_PAUSES_S``.

        Raises:
            RunError: another process has the directory.
            Exception: that of the last attempt.
        """
        for pause_s in RETRY_PAUSES_S:
            try:
                return act()
            except RunError:
                raise
            except Exception as error:
                if self._is_hurried.is_set():
                    raise
                self._failures.put(f"{line_of(error)}; trying again in {pause_s:g} s")
                self._is_hurried.wait(pause_s)
        return act()

    def reported(self) -> list[str]:
        """Takes the lines on attempts that have failed since the last time."""
        lines = []
        while True:
            try:
                lines.append(self._failures.get_nowait())
            except Empty:
                return lines


def line_of(error: BaseException) -> str:
    """Puts an error into one line."""
    return " ".join(f"{error}".split()) or type(error).__name__
