"""Checkpoints on disk: written, checked, read back."""
