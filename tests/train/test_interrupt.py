"""Ctrl-C and SIGTERM are noted and nothing is raised, until the loop asks; a second one ends the process at once."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from swift.errors import INTERRUPTED, STOPPED
from swift.train import display, interrupt
from swift.train.interrupt import Interrupt

BUSY = """
import hashlib, runpy, sys
Interrupt = runpy.run_path(sys.argv[1])["Interrupt"]  # the package would import JAX, too
more = {"ends_at_second": False} if sys.argv[3:] else {}
with Interrupt(float(sys.argv[2]), lambda: print("answered", flush=True), **more).hold():
    print("busy", flush=True)
    while True:  # in C, without Python's lock: its handlers wait
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 10**9)
"""
CAUGHT = """
import runpy, sys, time
Interrupt, Terminal = (runpy.run_path(path)[name] for path, name in zip(sys.argv[1:], ("Interrupt", "Terminal")))
with Interrupt(float(sys.argv[3])).hold(), Terminal(lambda: "a bar", catches_stderr=True) as terminal:
    terminal.print("busy")
    while True:
        time.sleep(1)
"""
PATIENCE_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_from_when_there_is_something_to_keep(number):
    before, asked = signal.getsignal(number), []
    with Interrupt() as interrupt:
        assert signal.getsignal(number) == before
        interrupt.hold()
        interrupt.hold()
        asked.append(interrupt.requested)
        os.kill(os.getpid(), number)
        asked.append(interrupt.requested)
    assert asked == [False, True]
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_run_in_another_thread_leaves_signals_alone():
    seen, before = [], signal.getsignal(signal.SIGINT)

    def run():
        with Interrupt().hold() as interrupt:
            seen.append((interrupt.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def busy(limit_s, *more):
    """A process whose main thread runs no Python."""
    command = [sys.executable, "-c", BUSY, interrupt.__file__, str(limit_s), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "busy\n"
    return process


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_process_that_runs_no_python(second):
    with busy(limit_s=1000) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "answered\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(second)
        assert process.wait(PATIENCE_S) == INTERRUPTED
        assert process.stderr.read() == "swift: ended at once\n"


def test_a_run_of_a_sweep_ignores_all_signals_but_the_first():
    """The limit still ends it."""
    with busy(1.0, "ignoring") as process:
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert process.wait(PATIENCE_S) == STOPPED


def test_a_process_that_does_not_stop_in_time_ends():
    begun = time.monotonic()
    with busy(limit_s=0.5) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == STOPPED
        assert process.stderr.read() == "swift: has not stopped within 0.5 s: ended; continue with --resume\n"
    assert time.monotonic() - begun > 0.5


@pytest.mark.parametrize(
    ("limit_s", "last"),
    [(1000, "swift: ended at once"), (0.5, "swift: has not stopped within 0.5 s: ended; continue with --resume")],
)
def test_a_display_that_catches_stderr_does_not_catch_the_last_line(limit_s, last):
    """Acts as that of ``launch`` does, on a terminal."""
    reader, terminal = pty.openpty()
    path = display.__file__
    command = [sys.executable, "-c", CAUGHT, interrupt.__file__, path, str(limit_s)]
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        while b"busy" not in shown:
            shown += os.read(reader, 1024)
        process.send_signal(signal.SIGINT)
        if limit_s == 1000:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the terminal's other side is closed
            while more := os.read(reader, 1024):
                shown += more
        os.close(reader)
    assert process.returncode == (INTERRUPTED if limit_s == 1000 else STOPPED)
    assert last in shown.decode().splitlines()
