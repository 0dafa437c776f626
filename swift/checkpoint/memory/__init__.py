"""Checkpoints in the memory of other ranks."""
