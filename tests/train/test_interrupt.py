"""Ctrl-C is noted and nothing is raised, until the loop asks; afterwards the process has its own handler again."""

import os
import signal
import threading

from swift.train.interrupt import Interrupt


def test_ctrl_c_is_noted_and_a_second_one_kills():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_in_another_thread_leaves_signals_alone():
    seen = []

    def run():
        with Interrupt() as interrupt:
            seen.append(interrupt.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]
