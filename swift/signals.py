"""Signals that ask a process to stop, and cleanup before such a signal ends it."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_CLEANING_S = 2.0


def stop_signals() -> list[signal.Signals]:
    """Returns SIGINT (Ctrl-C), SIGTERM and, unless it is ignored as with ``nohup``, SIGHUP (closed terminal)."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


@contextmanager
def cleaning_up(clean_up: Callable[[], None]) -> Iterator[None]:
    """Calls a cleanup function if a stop signal arrives during the ``with`` block, then lets it end the process.

    A thread calls the function, since Python runs no signal handler while the main thread is in XLA. Signals that
    already have a handler, or get one within the block, are left to that handler.

    Args:
        clean_up: function to call. It has two seconds to finish, since a file system may not respond.
    """
    is_main = threading.current_thread() is threading.main_thread()  # Python allows no other thread to set handlers
    numbers = [number for number in stop_signals() if is_main and signal.getsignal(number) is signal.SIG_DFL]
    if not numbers:
        yield
        return
    reader, writer = os.pipe()
    thread = threading.Thread(target=_end_after, args=(clean_up, numbers, reader), name="cleaning up", daemon=True)
    thread.start()  # before the handlers are set: if the thread cannot start, signals keep their default action
    os.set_blocking(writer, False)
    woken_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(woken_before)
        os.close(writer)
        thread.join()
        os.close(reader)


def _end_after(clean_up: Callable[[], None], numbers: list[signal.Signals], reader: int) -> None:
    """Reads signals from the wakeup pipe until it is closed; on one of ``numbers``, cleans up and ends the process."""
    while number := os.read(reader, 1):
        if number[0] not in numbers:
            continue
        with suppress(RuntimeError):  # no thread can be started: end without cleaning up
            cleaner = threading.Thread(target=clean_up, daemon=True)
            cleaner.start()
            cleaner.join(_CLEANING_S)
        # Restore the default action in C: ``signal.signal`` only works in the main thread, which may be in XLA.
        ctypes.pythonapi.PyOS_setsig(ctypes.c_int(number[0]), ctypes.c_void_p(0))
        os.kill(os.getpid(), number[0])
