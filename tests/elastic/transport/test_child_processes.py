"""Children are heard line by line, their ends are told once, and none outlives its block."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from swift import tasks
from swift.elastic.transport import children as child_processes
from swift.elastic.transport.children import LocalChildren
from swift.errors import RunError


@pytest.fixture
def children(tmp_path):
    with LocalChildren(os.environ, tmp_path) as children:
        yield children


def start(children, who, code, log):
    children.start(who, [sys.executable, "-c", code], log)


def until_dead(children):
    deadline, dead = time.monotonic() + 30, []
    while not dead and time.monotonic() < deadline:
        dead = children.deaths()
        time.sleep(0.02)
    return dead


def test_all_that_a_child_has_said_is_heard_but_not_what_it_died_in_the_midst_of(children, tmp_path):
    code = "import sys; print('one'); print('two'); print('no', file=sys.stderr); sys.stdout.write('thr'); sys.exit(3)"
    start(children, "a", code, tmp_path / "log")
    assert [(dead.child, dead.reason) for dead in until_dead(children)] == [("a", "exit code 3")]
    assert [(heard.child, heard.line) for heard in children.received(0.0)] == [("a", "one\n"), ("a", "two\n")]
    assert (tmp_path / "log").read_text() == "no\n"
    assert children.deaths() == []
    assert "a" not in children


def test_a_child_hears_what_is_said_and_the_dead_are_spoken_to_in_vain(children, tmp_path):
    start(children, "a", "print(input(), flush=True); input()", tmp_path / "log")
    children.send("a", "hello\n")
    assert [heard.line for heard in children.received(30.0)] == ["hello\n"]
    children.signal("a", signal.SIGKILL)
    time.sleep(0.2)
    children.send("a", "are you there?\n")
    assert [dead.reason for dead in until_dead(children)] == ["signal 9"]
    children.send("a", "and now?\n")


def test_one_that_hears_nothing_and_ignores_requests_to_end_is_killed(tmp_path, monkeypatch):
    """As a process that waits in a collective for a dead one."""
    monkeypatch.setattr(child_processes, "_STOP_S", 0.2)
    code = "import signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print(1, flush=True)\nwhile True: s.pause()"
    with LocalChildren(os.environ, tmp_path) as children:
        start(children, "a", code, tmp_path / "log")
        assert children.received(30.0)
        children.signal("a", signal.SIGTERM)
        children.send("a", "stop\n")
        children.wait_for(["a"])
        assert "a" not in children
        start(children, "b", code, tmp_path / "log")
        assert children.received(30.0)
        children.signal("b", signal.SIGKILL)
        assert [(dead.child, dead.reason) for dead in until_dead(children)] == [("b", "signal 9")]


def test_one_that_cannot_be_killed_is_given_up_and_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(child_processes, "_STOP_S", 0.1)
    monkeypatch.setattr(child_processes, "_KILL_S", 0.1)
    with LocalChildren(os.environ, tmp_path) as children:
        start(children, "a", "import os, time; print(os.getpid(), flush=True); time.sleep(1000)", tmp_path / "log")
        start(children, "b", "input()", tmp_path / "log")
        (heard,) = children.received(30.0)
        with monkeypatch.context() as undead:  # as it is in a system call that does not end
            undead.setattr(subprocess.Popen, "send_signal", lambda *_: None)
            children.wait_for(["a"])
        assert "a" not in children
        assert "b" in children
        assert children.deaths() == []
        children.signal("a", signal.SIGKILL)
        while is_there(int(heard.line)):  # one day it ends, and nobody is told
            assert children.deaths() == []


def is_there(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


class Stalled:
    """A log on a file system that does not answer until it is told to."""

    def __init__(self, path):
        self._path, self.answers = path, threading.Event()

    def open(self, mode):
        assert self.answers.wait(60)
        return self._path.open(mode)


def test_a_child_whose_log_is_on_a_file_system_that_stalls_keeps_nobody_waiting(children, tmp_path):
    log = Stalled(tmp_path / "log")
    start(children, "a", "print(input(), flush=True); print(input(), flush=True); input()", log)
    start(children, "b", "print('here', flush=True); input()", tmp_path / "other")
    children.send("a", "one\n")
    assert [heard.child for heard in children.received(30.0)] == ["b"]
    assert "a" in children
    assert children.deaths() == []
    log.answers.set()
    children.send("a", "two\n")
    said = []
    while len(said) < 2:
        said += [heard.line for heard in children.received(30.0)]
    assert said == ["one\n", "two\n"]


def test_a_child_that_is_killed_before_it_is_there_does_not_live(children, tmp_path):
    log = Stalled(tmp_path / "log")
    start(children, "a", "input()", log)
    children.signal("a", signal.SIGKILL)
    log.answers.set()
    assert [dead.reason for dead in until_dead(children)] == ["signal 9"]


def test_one_that_cannot_be_started_is_dead(children, tmp_path):
    children.start("a", ["/no/such/program"], tmp_path / "log")
    (dead,) = until_dead(children)
    assert dead.reason.startswith("cannot be started: ")
    assert "a" not in children


HELD = "import os; print(input(), os.getpid(), flush=True); input()"
"""Says nothing before its first line, as a child that is held has to."""


def pids_of(word):
    """Processes with a word in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word in (path / "cmdline").read_text().split("\0"):
                found.append(int(path.name))
    return found


def until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_that_is_held_is_none_before_it_is_started_and_then_is_the_same_process(children, tmp_path):
    command = [sys.executable, "-c", HELD, str(tmp_path / "marks-it")]
    for _ in range(2):
        children.hold("a", command, tmp_path / "log")
    until(lambda: pids_of(command[-1]))
    (held,) = pids_of(command[-1])
    children.send("a", "not yet\n")
    children.signal("a", signal.SIGKILL)
    assert "a" not in children
    children.start("a", command, tmp_path / "log")
    children.hold("a", command, tmp_path / "log")
    children.send("a", "hello\n")
    assert [heard.line for heard in children.received(30.0)] == [f"hello {held}\n"]
    assert pids_of(command[-1]) == [held]
    children.signal("a", signal.SIGKILL)
    assert [dead.reason for dead in until_dead(children)] == ["signal 9"]


def test_one_that_dies_while_it_is_held_is_not_mourned_nor_held_again_and_another_is_started(children, tmp_path):
    command = [sys.executable, "-c", HELD, str(tmp_path / "marks-it")]
    children.hold("a", command, tmp_path / "log")
    until(lambda: pids_of(command[-1]))
    (held,) = pids_of(command[-1])
    os.kill(held, signal.SIGKILL)
    os.waitid(os.P_PID, held, os.WEXITED | os.WNOWAIT)  # its command is gone from /proc a moment before
    children.hold("a", command, tmp_path / "log")
    assert children.deaths() == []
    assert pids_of(command[-1]) == []
    children.start("a", command, tmp_path / "log")
    children.send("a", "hello\n")
    (heard,) = children.received(30.0)
    assert heard.line.startswith("hello ")
    assert heard.line != f"hello {held}\n"


def test_none_that_is_held_is_left(tmp_path):
    command = [sys.executable, "-c", HELD, str(tmp_path / "marks-it")]
    with LocalChildren(os.environ, tmp_path) as children:
        children.hold("a", command, tmp_path / "log")
        until(lambda: pids_of(command[-1]))
    assert pids_of(command[-1]) == []


def test_none_is_left_not_even_one_that_is_stopped(tmp_path):
    with LocalChildren(os.environ, tmp_path) as children:
        start(children, "a", "import os, time; print(os.getpid(), flush=True); time.sleep(1000)", tmp_path / "log")
        (heard,) = children.received(30.0)
        children.signal("a", signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(int(heard.line), 0)


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("what", ["thread", "process"])
def test_a_limit_on_tasks_that_is_reached_for_a_while_costs_nothing(children, tmp_path, monkeypatch, what, lasts):
    tries = []

    def refuse(real, error):
        def start_or_refuse(*words, **named):
            tries.append(what)
            if lasts or len(tries) < 4:
                raise error
            return real(*words, **named)

        return start_or_refuse

    monkeypatch.setattr(tasks, "_RETRY_S", 0.01)
    for limit in ("_THREAD_S", "_PROCESS_S"):
        monkeypatch.setattr(child_processes, limit, 0.1 if lasts else 60.0)
    if what == "thread":
        error = RuntimeError("can't start new thread")
        real, begun = threading.Thread.start, set()

        def start_once(thread):
            assert id(thread) not in begun, "Python 3.13 starts no thread a second time"
            begun.add(id(thread))
            threads.append(thread)
            refuse_some(thread)

        threads, refuse_some = [], refuse(real, error)
        monkeypatch.setattr(threading.Thread, "start", start_once)
    else:
        error = BlockingIOError(11, "Resource temporarily unavailable")
        monkeypatch.setattr(subprocess, "Popen", refuse(subprocess.Popen, error))
    start(children, "a", "print(1)", tmp_path / "log")
    (dead,) = until_dead(children)
    assert dead.reason.startswith(f"cannot be started: {error}" if lasts else "exit code 0")
    assert len(tries) >= 4


def test_a_child_that_cannot_be_started_yet_and_is_not_needed_any_more_is_not_waited_for(tmp_path, monkeypatch):
    tried = threading.Event()

    def refuse(*_, **__):
        tried.set()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(child_processes, "_PROCESS_S", 10**9)
    monkeypatch.setattr(child_processes, "_STOP_S", 10**9)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with LocalChildren(os.environ, tmp_path) as children:
        start(children, "a", "", tmp_path / "log")
        assert tried.wait(60)
    assert "a" not in children


def test_all_children_together_hold_their_starter_up_once(children, tmp_path, monkeypatch):
    """As it sends heartbeats, and many children of a run may be started again in one turn."""
    waits = []

    def refuse(*_, limit_s):
        waits.append(limit_s)
        raise RunError("can't start new thread")

    monkeypatch.setattr(child_processes, "start_thread", refuse)
    for child in "abc":
        start(children, child, "", tmp_path / "log")
    assert waits == [child_processes._THREAD_S, 0.0, 0.0]
    assert [dead.child for dead in children.deaths()] == ["a", "b", "c"]


def test_a_child_that_was_killed_for_memory_is_said_to_be(children, tmp_path, monkeypatch):
    kills = iter([0, 1])
    monkeypatch.setattr(child_processes, "num_memory_kills", lambda: next(kills))
    start(children, "a", "import os; os.kill(os.getpid(), 9)", tmp_path / "log")
    assert [dead.reason for dead in until_dead(children)] == ["signal 9, as its control group was out of memory"]
