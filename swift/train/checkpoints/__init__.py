"""Checkpoints of a run in one process."""
