"""Lowering of a schedule to the tick table that one SPMD program interprets.

``ticks`` assigns ops to ticks by a beam search. ``tick_table`` defines the table, groups messages into permutations and
allocates buffer slots. ``lower`` fills the table and computes its memory.
"""
