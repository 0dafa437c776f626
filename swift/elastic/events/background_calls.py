"""Calls that somebody who must not wait for a file system leaves to a thread."""

import threading
from collections.abc import Callable
from queue import Queue
from types import TracebackType
from typing import Any, Self

_ROOM = 10_000


class BackgroundCalls:
    """Carries out calls in a thread, one after the other, in the order in which they were asked for; a context manager.

    Args:
        room: how many calls may wait; who asks for more waits as well, for memory has an end.
    """

    def __init__(self, room: int = _ROOM):
        self._calls: Queue[Callable[[], Any]] = Queue(room)
        self._error: Exception | None = None
        threading.Thread(target=self._work, name="behind", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._calls.join()
        if kind is None:
            self._raise()

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Has something done; raises what something that was asked for before has raised."""
        self._raise()
        self._calls.put(lambda: function(*arguments, **named))

    def settle(self) -> None:
        """Waits until all that was asked for is done; raises as ``call`` does."""
        self._calls.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                if self._error is None:  # what follows a line that is missing would be a record of something else
                    call()
            except Exception as error:
                self._error = error
            finally:
                self._calls.task_done()
