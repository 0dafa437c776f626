"""Timing of ops whose order on every worker is given.

``graph`` says which op waits for which, and ``timing`` finds the shortest period.
"""
