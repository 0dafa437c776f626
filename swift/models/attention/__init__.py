"""Causal self-attention: the module with its norm, and the kernels that mix values.

``module`` is what a layer has; ``plain`` states what attention is, with all scores in memory; ``blockwise`` computes
the same a block of scores at a time, on any device, and in smaller ones for CPUs; ``kernels`` has those of libraries,
and chooses one.
"""

from swift.models.attention.blockwise import blockwise_attention, tiled_attention
from swift.models.attention.kernels import KERNELS, AttentionKernel, choose_kernel
from swift.models.attention.module import Attention
from swift.models.attention.plain import causal_attention

__all__ = [
    "KERNELS",
    "Attention",
    "AttentionKernel",
    "blockwise_attention",
    "causal_attention",
    "choose_kernel",
    "tiled_attention",
]
