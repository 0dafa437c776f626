"""A signal that ends a process has it clean up before, whatever its main thread does; handlers of others stay."""

import os
import signal
import subprocess
import sys

import pytest

from swift.signals import cleaning_up

BUSY = """
import hashlib, signal, sys, time
from swift.signals import cleaning_up
signal.signal(signal.SIGINT, signal.SIG_DFL)
with cleaning_up(lambda: (print("cleaned up", flush=True), time.sleep(60 * (sys.argv[1] == "stalls")))):
    print("busy", flush=True)
    while True:  # in C, without Python's lock: its handlers wait
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 10**9)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("how", ["ends", "stalls"])
def test_a_process_that_runs_no_python_cleans_up_and_ends_by_its_signal(number, how):
    with subprocess.Popen([sys.executable, "-c", BUSY, how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "busy\n"
        process.send_signal(number)
        assert process.stdout.read() == "cleaned up\n"
        assert process.wait(30) == -number


def test_signals_that_have_a_handler_are_left_to_it_and_all_is_as_before_in_the_end():
    noted, cleaned = [], []
    before = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    try:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        with cleaning_up(lambda: cleaned.append(1)):
            os.kill(os.getpid(), signal.SIGTERM)
        assert handlers == {number: signal.getsignal(number) for number in handlers}
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (noted, cleaned) == ([signal.SIGTERM], [])
    assert signal.set_wakeup_fd(-1) == -1
