"""The head's matrix in shares: each expert rank has some of its columns, a share of the vocabulary.

``share_losses`` is the loss with them, ``column_shares`` how weights and gradients travel between the shares and the
slices of the optimizer's state.
"""

from swift.models.vocabulary.column_shares import ColumnShares, share_size
from swift.models.vocabulary.share_losses import sum_of_losses_in_shares

__all__ = ["ColumnShares", "share_size", "sum_of_losses_in_shares"]
