"""Checkpoints of a training run.

The division of its state, its saving and reading, and a refuge for it when the disk cannot hold it; model directories,
and what a new run begins with.
"""
