"""Causal self-attention: the module with its norm, and the kernels that mix values.

``module`` is what a layer has; ``plain`` states what attention is, with all scores in memory; ``blockwise`` computes
the same a block of scores at a time, on any device, and in smaller ones for CPUs; ``kernels`` has those of libraries,
and chooses one.
"""
