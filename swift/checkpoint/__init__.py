"""Checkpoints: what is saved of a run, and how it is checked when it is read back."""

from swift.checkpoint.arrays import load_arrays, load_metadata, save_arrays
from swift.checkpoint.full import checkpoint_path, checkpoint_steps, load_checkpoint, save_checkpoint

__all__ = [
    "checkpoint_path",
    "checkpoint_steps",
    "load_arrays",
    "load_checkpoint",
    "load_metadata",
    "save_arrays",
    "save_checkpoint",
]
