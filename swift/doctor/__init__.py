"""Checks what a machine lacks for runs: packages, drivers, memory, a usable run directory, and the other machines.

Nothing here imports JAX, which may be the broken part; it is tried in a separate process.
"""
