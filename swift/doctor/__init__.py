"""Checks that a machine has what runs need: packages, drivers, memory, a usable run directory, and the other machines.

Nothing here imports JAX, which may be the broken part; it is tested in a separate process.
"""
