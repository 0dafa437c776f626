"""Membership: decides which processes form each generation and how the run recovers from failures.

It is a state machine of pure functions: events and their times go in, commands come out. It uses neither JAX nor a
clock, so tests can replay any sequence of failures. ``messages`` defines the events that the supervisor reports and the
commands that the supervisor carries out, ``status`` the known status of a run, and ``state_machine`` the decisions.
``failure_detector`` finds processes that have stopped responding.
"""
