"""Processes beside the workers: one writes checkpoints, one compiles ahead."""
