"""Sharded head and embedding: each expert rank has a part of the vocabulary.

``lookup`` embeds tokens whose rows are spread over the ranks, and caches rows that a rank needs in several
micro-batches. ``sharded_loss`` is the loss with some of the head's columns on each rank. ``layouts`` defines where the
optimizer state of both lives, and how weights and gradients travel between it and the shards.
"""
