"""Starts of threads and processes under a limit on tasks, which is reached for a moment or for good."""

import errno
import subprocess
import threading

import pytest

from swift import tasks
from swift.errors import RunError
from swift.tasks import check_threads, one_thread, retried, start_thread


def refuses(times, monkeypatch):
    """Has no thread start the first times; returns those that were tried, none of them twice as in Python 3.13."""
    start, tried = threading.Thread.start, []

    def start_or_refuse(thread):
        assert thread not in tried
        tried.append(thread)
        if len(tried) <= times:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    monkeypatch.setattr(tasks, "_RETRY_S", 0.001)
    return tried


def test_a_limit_that_is_reached_for_a_moment_costs_nothing(monkeypatch):
    tried, called = refuses(3, monkeypatch), []
    start_thread(called.append, "called", limit_s=60.0).join()
    assert (len(tried), called) == (4, ["called"])


def test_one_that_lasts_is_told_in_a_line_that_names_it(monkeypatch):
    refuses(10**9, monkeypatch)
    with pytest.raises(RunError, match=r"^can't start new thread: is the limit on tasks reached \(ulimit -u, or pids"):
        start_thread(print, limit_s=0.01)


def test_a_thread_that_is_needed_later_is_there_and_makes_every_call_once(monkeypatch):
    refuses(3, monkeypatch)
    called = []
    with one_thread("early", limit_s=60.0) as executor:
        refuses(10**9, monkeypatch)
        assert [executor.submit(called.append, number).result() for number in range(3)] == [None] * 3
    assert called == [0, 1, 2]


def test_one_thread_that_cannot_be_started_is_told_in_a_line(monkeypatch):
    refuses(10**9, monkeypatch)
    with pytest.raises(RunError, match="is the limit on tasks reached"):
        one_thread("early", limit_s=0.01)


@pytest.mark.parametrize("number", [0, 5])
def test_room_for_threads_is_checked_by_starting_them(monkeypatch, number):
    before, tried = threading.active_count(), refuses(0, monkeypatch)
    check_threads(number)
    assert len(tried) == number
    assert threading.active_count() == before


def test_without_room_for_all_threads_none_is_left(monkeypatch):
    before, start, tried = threading.active_count(), threading.Thread.start, []

    def start_some(thread):
        tried.append(thread)
        if len(tried) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        check_threads(5)
    assert threading.active_count() == before


def test_other_errors_are_raised_at_once():
    def fail():
        raise FileNotFoundError(errno.ENOENT, "no such program")

    with pytest.raises(FileNotFoundError):
        retried(fail, 1000.0)


def test_a_process_is_tried_again(monkeypatch):
    monkeypatch.setattr(tasks, "_RETRY_S", 0.001)
    answers = iter([BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")] * 2)

    def start():
        for error in answers:
            raise error
        return subprocess.Popen(["true"])

    assert retried(start, 60.0).wait() == 0
