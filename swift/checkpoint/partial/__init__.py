"""Partial checkpoints (MoC-System): which experts are saved, and the tokens that this loses."""
