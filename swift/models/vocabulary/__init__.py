"""Head and embedding in shares: each expert rank has a part of the vocabulary.

``share_losses`` is the loss with some columns of the head on each rank, ``column_shares`` how weights and gradients
travel between them and the slices of the optimizer's state. ``row_look_up`` looks up rows of the embedding, of which
each rank has some, ``hot_rows`` copies those that a rank needs in several micro-batches, and ``row_shares`` is the
layout of their state.
"""
