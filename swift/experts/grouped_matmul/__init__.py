"""Grouped matmul: rows sorted by slot, each multiplied by the weights of its own slot."""
