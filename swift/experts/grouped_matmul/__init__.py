"""Grouped matmul: rows sorted by slot, each multiplied by the weights of its own slot."""

from swift.experts.grouped_matmul.groups import Groups, block_rows, padded_rows
from swift.experts.grouped_matmul.multiply import grouped_matmul

__all__ = ["Groups", "block_rows", "grouped_matmul", "padded_rows"]
