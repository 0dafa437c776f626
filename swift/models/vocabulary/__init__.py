"""Head and embedding in shares: each expert rank has a part of the vocabulary.

``sharded_loss`` is the loss with some columns of the head on each rank, ``layouts`` how weights and gradients
travel between them and the slices of the optimizer's state. ``lookup`` looks up rows of the embedding, of which
each rank has some, ``lookup`` copies those that a rank needs in several micro-batches, and ``layouts`` is the
layout of their state.
"""
