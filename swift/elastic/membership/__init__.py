"""The membership of a run of several processes.

A state machine that decides which processes form each generation and how the run recovers from failures: pure functions
of events and times, without JAX and without a clock. The supervisor reports the events and carries out the commands.
``failure_detector`` finds processes that have stopped responding, and ``machine`` the slices of a state that
still exist.
"""
