"""Checkpoints of a training run, whole and partial (MoC-System).

``partial`` chooses the experts that a checkpoint saves and counts the tokens that this loses, ``storage`` writes,
verifies and reads checkpoints on disk, ``host_save`` has several hosts write one together, and ``memory`` keeps
snapshots of each rank in the memory of another.
"""
