"""Parser of the command line with all its options, and the line that a terminal shows while JAX is loaded.

Nothing here imports JAX, which takes seconds.
"""
