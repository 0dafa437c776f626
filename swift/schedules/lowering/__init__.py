"""Lowering: from a schedule to the tick table that one SPMD program interprets, with its messages and buffers.

``ticks`` assigns ops to ticks, by a beam search; ``tick_table`` defines the table, turns messages into permutations and
allocates slots; ``lower`` fills the table and sums its memory.
"""
