"""The signals that ask a process to stop."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_CLEANING_S = 2.0


def stop_signals() -> list[signal.Signals]:
    """Lists Ctrl-C, SIGTERM and SIGHUP, that of a closed terminal, unless the caller has it ignored (``nohup``)."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


@contextmanager
def cleaning_up(clean_up: Callable[[], None]) -> Iterator[None]:
    """Has a signal that ends this process during the block call a function before.

    It still ends at once, and by that signal: a thread calls the function, since Python calls no handler while the main
    thread is in XLA. Signals that have a handler already, or get one in the block, are left to it.

    Args:
        clean_up: the function; it has two seconds, as a file system may not respond.
    """
    is_main = threading.current_thread() is threading.main_thread()  # Python allows no other thread to set handlers
    numbers = [number for number in stop_signals() if is_main and signal.getsignal(number) is signal.SIG_DFL]
    if not numbers:
        yield
        return
    reader, writer = os.pipe()
    thread = threading.Thread(target=_end_after, args=(clean_up, numbers, reader), name="cleaning up", daemon=True)
    thread.start()  # first: without a thread to answer them, signals keep their effect
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
    """Reads numbers of signals as they arrive, until the pipe is closed; one of these ends the process."""
    while number := os.read(reader, 1):
        if number[0] not in numbers:
            continue
        with suppress(RuntimeError):  # no more threads are allowed
            cleaner = threading.Thread(target=clean_up, daemon=True)
            cleaner.start()
            cleaner.join(_CLEANING_S)
        # ``signal.signal`` is for the main thread alone, which may be in XLA.
        ctypes.pythonapi.PyOS_setsig(ctypes.c_int(number[0]), ctypes.c_void_p(0))
        os.kill(os.getpid(), number[0])
