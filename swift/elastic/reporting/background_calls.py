"""Calls made in a thread, on behalf of callers that must not wait for a file system."""

from collections.abc import Callable
from queue import Queue
from typing import Any, Self

from swift.tasks import start_thread

_MAX_WAITING = 10_000


class BackgroundCalls:
    """Makes calls in a thread, in the order in which they are requested; a context manager.

    Args:
        max_waiting: number of calls that may wait; beyond it callers wait as well, since memory is limited.
    """

    def __init__(self, max_waiting: int = _MAX_WAITING):
        self._calls: Queue[Callable[[], Any]] = Queue(max_waiting)
        self._error: BaseException | None = None
        start_thread(self._work, name="background")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._calls.join()
        if kind is None:
            self.raise_failed()

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Requests a call; raises the error of an earlier one."""
        self.raise_failed()
        self._calls.put(lambda: function(*arguments, **named))

    def settle(self) -> None:
        """Waits until all requested calls are made; raises the error of any."""
        self._calls.join()
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raises the error of an earlier call, if one has failed."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                if self._error is None:  # a record with a line missing in the middle would be wrong
                    call()
            except BaseException as error:  # also SystemExit, which would end this thread: callers would wait for ever
                self._error = error
            finally:
                self._calls.task_done()
