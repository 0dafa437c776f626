"""Distribution of a micro-batch's sequences over the expert ranks, as even as possible; the rest is padding.

Legend: B sequences of a micro-batch, N expert ranks, T positions.
"""

import numpy as np
from jaxtyping import Shaped


def sequences_per_rank(num_sequences: int, num_ranks: int) -> int:
    """Sequences of a micro-batch that every rank has room for.

    >>> sequences_per_rank(16, 8), sequences_per_rank(16, 7)
    (2, 3)
    """
    return -(-num_sequences // num_ranks)


def share_sequences(leaf: Shaped[np.ndarray, "*lead B T"], num_ranks: int) -> Shaped[np.ndarray, "*lead N b T"]:
    """Divides ``[..., B, T]`` into the ranks' shares ``[..., N, ceil(B / N), T]``, whole sequences in order.

    A rank with one sequence less than another gets zeros, which are not valid tokens.

    >>> share_sequences(np.array([[1], [2], [3]]), num_ranks=2).tolist()
    [[[1], [2]], [[3], [0]]]
    """
    *lead, num_sequences, length = leaf.shape
    room = sequences_per_rank(num_sequences, num_ranks)
    if num_sequences == num_ranks * room:
        return leaf.reshape(*lead, num_ranks, room, length)
    shares = np.zeros((*lead, num_ranks, room, length), leaf.dtype)
    for rank, mine in enumerate(np.array_split(np.arange(num_sequences), num_ranks)):
        shares[..., rank, : len(mine), :] = leaf[..., mine, :]
    return shares
