"""Lowering: from a schedule to the tick table that one SPMD program interprets, with its messages and buffers.

``ticks`` assigns ops to ticks, by a ``ticks`` search; ``tick_table`` turns messages into permutations and allocates
slots; ``lower`` fills the ``tick_table``; ``lower`` sums its memory.
"""
