"""A thread that keeps the temporary directories of a run there."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Self

from swift.errors import RunError
from swift.tasks import start_thread

_LOOK_S, _END_S = 1.0, 1.0


class DirectoryMender:
    """Makes again, once a second, what somebody has removed of a run's directories; a context manager.

    A thread does so: a directory may be on a file system that does not respond, and whoever sends heartbeats must not
    wait for it. If no thread can be started nothing is mended.

    Args:
        mend: function that makes what is missing, and returns whether anything was; may raise OSError.
    """

    def __init__(self, mend: Callable[[], bool]):
        self._mend, self._news = mend, SimpleQueue[str]()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        with suppress(RunError):
            self._thread = start_thread(self._work, name="directories")
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread, before the directories are removed for good."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def news(self) -> str | None:
        """Returns the next line on what was removed; None: there is no other."""
        with suppress(Empty):
            return self._news.get_nowait()
        return None

    def _work(self) -> None:
        told = None
        while not self._ended.wait(_LOOK_S):
            text = self._look()
            if text is not None and text != told:
                self._news.put(text)
            told = text

    def _look(self) -> str | None:
        try:
            if self._mend():
                return "the run's temporary directories were removed; they are made again"
        except OSError as error:
            why = error.strerror or error
            return f"the run's temporary directories were removed and cannot be made again: {why}"
        return None
