"""Threads and processes under a limit on tasks, of the user (``ulimit -u``) or of a control group (``pids.max``).

Others may reach the limit for a moment, so a start that fails is tried again.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swift.errors import RunError

THREAD_S, _RETRY_S = 4.0, 0.1
_T = TypeVar("_T")


def retried(start: Callable[[], _T], limit_s: float) -> _T:
    """Starts a thread or a process, again and again while the limit is reached.

    Args:
        start: function that starts it. It has to make a new thread each time: one whose start has failed cannot be
            started again (Python 3.13).
        limit_s: seconds after which the error is raised.

    Raises:
        RuntimeError: no thread can be started.
        OSError: no process can be started.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return start()
        except (RuntimeError, BlockingIOError):  # "can't start new thread", and EAGAIN of a fork
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def start_thread(
    target: Callable[..., object], *arguments: Any, name: str | None = None, limit_s: float = THREAD_S
) -> threading.Thread:
    """Starts a thread that does not keep the process alive, and returns it.

    Args:
        target: function that it calls.
        arguments: arguments of the function.
        name: name of the thread.
        limit_s: seconds for which the start is tried; the caller waits.

    Raises:
        RunError: it cannot be started.
    """

    def start() -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    return _started(start, limit_s)


def one_thread(name: str, limit_s: float = THREAD_S) -> ThreadPoolExecutor:
    """Returns an executor whose only thread has been started: no later call can fail for want of one.

    A call that an executor cannot start a thread for stays in its queue, and is made all the same if another follows.

    Args:
        name: name of the thread.
        limit_s: seconds for which the start is tried; the caller waits.

    Raises:
        RunError: it cannot be started.
    """
    executor = ThreadPoolExecutor(1, name)
    _started(lambda: executor.submit(int), limit_s)  # any function without effect
    return executor


def check_threads(number: int) -> None:
    """Checks that so many threads can be started, before a library starts some that aborts the process where it cannot.

    Raises:
        RuntimeError: they cannot.
    """
    end, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(number):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    finally:
        end.set()
        for thread in threads:
            thread.join()


def _started(start: Callable[[], _T], limit_s: float) -> _T:
    """Returns the result of `retried`; raises RunError, which names the limit, where that raises RuntimeError."""
    try:
        return retried(start, limit_s)
    except RuntimeError as error:
        question = "is the limit on tasks reached (ulimit -u, or pids.max of a control group)?"
        raise RunError(f"{error}: {question}") from error
