"""Sharded head and embedding: each expert rank has a part of the vocabulary.

``lookup`` embeds tokens with rows that are on several ranks, and keeps copies of those that a rank needs in several
micro-batches. ``sharded_loss`` is the loss with some columns of the head on each rank. ``layouts`` says where the
optimizer's state of both is, and how weights and gradients travel between it and the shares.
"""
