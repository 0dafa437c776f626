"""Partial checkpoints (MoC-System).

``expert_units`` divides a state into a dense part and experts, ``selection`` chooses the experts that a checkpoint
saves, and ``lost_tokens`` counts the tokens that a restore loses by it.
"""
