"""Head and embedding in shares: each expert rank has a part of the vocabulary.

``share_losses`` is the loss with some columns of the head on each rank, ``column_shares`` how weights and gradients
travel between them and the slices of the optimizer's state. ``row_look_up`` looks up rows of the embedding, of which
each rank has some, ``hot_rows`` copies those that a rank needs in several micro-batches, and ``row_shares`` is the
layout of their state.
"""

from swift.models.vocabulary.column_shares import ColumnShares, share_size
from swift.models.vocabulary.embedding import Copies, embed, embedding_gradient
from swift.models.vocabulary.hot_rows import add_gradients_of_copies, choose_hot_rows, fetch_copies, num_hot_rows
from swift.models.vocabulary.row_look_up import (
    gradient_in_shares,
    look_up_in_shares,
    requests_at_once,
    rounds_if_different,
)
from swift.models.vocabulary.row_shares import RowShares
from swift.models.vocabulary.share_losses import sum_of_losses_in_shares

__all__ = [
    "ColumnShares",
    "Copies",
    "RowShares",
    "add_gradients_of_copies",
    "choose_hot_rows",
    "embed",
    "embedding_gradient",
    "fetch_copies",
    "gradient_in_shares",
    "look_up_in_shares",
    "num_hot_rows",
    "requests_at_once",
    "rounds_if_different",
    "share_size",
    "sum_of_losses_in_shares",
]
