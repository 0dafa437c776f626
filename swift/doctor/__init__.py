"""The things that a machine lacks for runs: packages, drivers, memory, a directory that works, and the other machines.

Nothing here loads JAX, which may be what is broken; it is tried in a process of its own.
"""
