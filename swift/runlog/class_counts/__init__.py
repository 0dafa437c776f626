"""Counts by expert class of every iteration: the binary file ``class_counts.bin`` beside ``metrics.jsonl``.

``layout`` defines the file, ``writer`` appends to it, ``reader`` reads it. Entries are in the order of their steps; a
step may be missing.
"""
