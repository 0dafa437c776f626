"""Sharded head and embedding: each expert rank has a part of the vocabulary.

``lookup`` embeds tokens whose rows are spread over the ranks, and caches rows that a rank needs in several
micro-batches. ``sharded_loss`` computes the loss when each rank has some of the head's columns. ``layouts`` defines
where the optimizer state of both lives, and how weights and gradients are exchanged between it and the shards.
"""
