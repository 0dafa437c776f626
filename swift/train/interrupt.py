"""Ctrl-C and SIGTERM, handled between iterations, since XLA may crash on or swallow an exception at other points."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self

from swift.errors import INTERRUPTED, STOPPED
from swift.output import write_at_once
from swift.signals import stop_signals

SAVING = "stopping after this iteration, which will be saved"
STOPPING = f"{SAVING}; a second Ctrl-C or SIGTERM ends at once"
_SHOW_CURSOR = "\x1b[?25h\n"


class Interrupt:
    """Handles ``stop_signals`` after ``hold``: the first signal sets a flag, and the loop stops at a safe point.

    A second signal or the time limit terminates the process at once. A thread does this, since Python runs no
    signal handlers while the main thread is in XLA. The thread writes its final message to stderr as it was at
    ``hold``, as a display may redirect stderr later. A context manager that restores the previous handlers on exit.

    Args:
        limit_s: seconds from the first signal until the process is terminated; None for no limit.
        answer: function that is called in a thread at the first signal, even while the main thread compiles.
        ends_at_second: whether a second signal terminates the process; otherwise it is ignored.
    """

    def __init__(
        self, limit_s: float | None = None, answer: Callable[[], None] = lambda: None, *, ends_at_second: bool = True
    ) -> None:
        self.requested, self._answer, self._ends_at_second = False, answer, ends_at_second
        self._limit_s, self._previous, self._is_held = limit_s, dict[signal.Signals, Any](), False
        self._stderr: int | None = None  # None if it is closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            signal.set_wakeup_fd(self._woken_before)
            os.close(self._writer)
            self._thread.join()
            os.close(self._reader)
            if self._stderr is not None:
                os.close(self._stderr)
        self._previous = {}

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal has arrived."""
        if self.requested:
            raise KeyboardInterrupt

    def hold(self) -> Self:
        """Starts to handle signals; until then, a signal has its usual effect."""
        if self._is_held or threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread set handlers
        self._is_held = True
        with suppress(OSError):
            self._stderr = os.dup(2)
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python's C handler writes each signal's number here, even while the main thread is in XLA.
        self._woken_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._note) for number in stop_signals()}
        self._thread = threading.Thread(target=self._watch, name="interrupt", daemon=True)
        self._thread.start()
        return self

    def _note(self, *_: Any) -> None:
        self.requested = True

    def _watch(self) -> None:
        """Reads signal numbers from the wakeup pipe until it is closed."""
        is_first, deadline = True, float("inf")
        while True:
            wait_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._reader], [], [], None if wait_s == float("inf") else wait_s)[0]:
                self._end(f"swift: has not stopped within {self._limit_s:g} s: ended; continue with --resume", STOPPED)
            number = os.read(self._reader, 1)
            if not number:
                return
            if number[0] not in self._previous:  # such as SIGWINCH, when a terminal is resized
                continue
            if not is_first and self._ends_at_second:
                self._end("swift: ended at once", INTERRUPTED)
            if not is_first:
                continue
            is_first, self.requested = False, True
            # Use a separate thread: the answer may block if nobody reads it, and must not delay the time limit.
            with suppress(RuntimeError):  # if no thread can be started, the second signal and the limit still work
                threading.Thread(target=self._answer, name="answer", daemon=True).start()
            if self._limit_s is not None:
                deadline = time.monotonic() + self._limit_s

    def _end(self, reason: str, code: int) -> NoReturn:
        """Terminates the process from any thread. The next run removes the remaining temporary files."""
        if self._stderr is not None:
            if os.isatty(self._stderr):
                reason = f"{_SHOW_CURSOR}{reason}"  # a live display hides it
            write_at_once(self._stderr, f"{reason}\n".encode())
        os._exit(code)
