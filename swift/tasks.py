"""Starts threads and processes under a limit on tasks: the user's (``ulimit -u``) or a control group's (``pids.max``).

Other processes may exhaust the limit temporarily, so a failed start is retried.
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
    """Starts a thread or a process; retries a failed start until the time limit.

    Args:
        start: function that creates the thread or process and starts it. It must create a new thread on each call,
            since a thread whose start failed cannot be started again (Python 3.13).
        limit_s: seconds after which the last error is raised instead of retrying.

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
    """Starts and returns a daemon thread, which does not keep the process alive.

    Args:
        target: function to call in the thread.
        arguments: arguments of the function.
        name: name of the thread.
        limit_s: seconds for which a failed start is repeated, while the caller waits.

    Raises:
        RunError: the thread cannot be started.
    """

    def start() -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    return _started(start, limit_s)


def one_thread(name: str, limit_s: float = THREAD_S) -> ThreadPoolExecutor:
    """Returns an executor whose only thread is already started, so that no later call fails for lack of a thread.

    An executor that cannot start its thread raises, but leaves the call in its queue, and would still run it if another
    call followed.

    Args:
        name: name of the thread.
        limit_s: seconds for which a failed start is repeated, while the caller waits.

    Raises:
        RunError: the thread cannot be started.
    """
    executor = ThreadPoolExecutor(1, name)
    _started(lambda: executor.submit(int), limit_s)  # any function without effect
    return executor


def check_threads(number: int) -> None:
    """Checks that ``number`` more threads can be started, for use before a library that would abort if they cannot.

    Raises:
        RuntimeError: that many threads cannot be started.
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
    """Calls ``retried``; converts its RuntimeError to a RunError that mentions the limit on tasks."""
    try:
        return retried(start, limit_s)
    except RuntimeError as error:
        question = "is the limit on tasks reached (ulimit -u, or pids.max of a control group)?"
        raise RunError(f"{error}: {question}") from error
