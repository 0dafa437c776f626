"""The membership of a run of several processes.

A state machine that decides which processes form each generation and how the run recovers from failures: pure functions
of events and times, without JAX and without a clock. ``messages`` has the events that the supervisor reports and the
commands that it carries out, ``status`` what is known of a run, and ``machine`` the decisions. ``failure_detector``
finds processes that have stopped responding.
"""
