"""Capacity by rank: the slots of a rank share its buffer."""
