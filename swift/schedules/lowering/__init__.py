"""Lowering: turns a schedule into the tick table that one SPMD program interprets.

``ticks`` assigns ops to ticks by a beam search. ``tick_table`` defines the table, turns messages into permutations and
allocates buffer slots. ``lower`` fills the table and adds up its memory.
"""
