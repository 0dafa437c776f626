"""The backward pass split into input gradient B and weight gradient W.

A stage's jaxpr, which equations belong to F, B and W, and the smallest set of values to keep between them.
"""

from swift.pipeline.split_backward.flops import dot_bytes, dot_flops
from swift.pipeline.split_backward.split import SplitStage, split

__all__ = [
    "SplitStage",
    "dot_bytes",
    "dot_flops",
    "split",
]
