"""Reconfiguration from one failure set to the next.

The plan of a failure set, its compiled steps, the cache of executables, and moving or resharding a state to other
workers.
"""
