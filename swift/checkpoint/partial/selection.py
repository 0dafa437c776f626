"""Choice of the experts that a partial checkpoint saves, and its size (MoC-System, arXiv 2408.04307: PEC).

Legend: L MoE layers of the model, E expert classes, K classes of a layer that a checkpoint saves.
"""

import numpy as np
from jaxtyping import Int


def first_turns(num_layers: int, num_classes: int, k: int) -> Int[np.ndarray, " L"]:
    """The class with which each layer's round begins, int64 ``[L]``: K classes after that of the layer below.

    Layers are interleaved so that, where each rank holds classes of its own, all ranks write equally much.

    >>> first_turns(3, 4, 2).tolist()
    [0, 2, 0]
    """
    return np.arange(num_layers) * k % max(num_classes, 1)


def sequential(turn_L: Int[np.ndarray, " L"], num_classes: int, k: int) -> Int[np.ndarray, "L K"]:
    """The next K classes of every layer's round, int64 ``[L, K]``.

    Args:
        turn_L: the class whose turn it is, by layer.
        num_classes: E.
        k: at most E.

    >>> sequential(np.array([0, 3]), 4, 2).tolist()
    [[0, 1], [3, 0]]
    """
    return (turn_L[:, None] + np.arange(k)) % max(num_classes, 1)


def next_turns(turn_L: Int[np.ndarray, " L"], num_classes: int, k: int) -> Int[np.ndarray, " L"]:
    """The turns ``[L]`` after a sequential save of K classes."""
    return (turn_L + k) % max(num_classes, 1)


def load_aware(
    unsaved_LE: Int[np.ndarray, "L E"], saved_at_LE: Int[np.ndarray, "L E"], k: int
) -> Int[np.ndarray, "L K"]:
    """The K classes of every layer with the most token updates since their last save, int64 ``[L, K]``.

    Ties go to the class that was saved longest ago, then to the lower class.

    Args:
        unsaved_LE: token updates since the last save.
        saved_at_LE: iteration of the last save.
        k: at most E.

    >>> load_aware(np.array([[5, 9, 9, 0]]), np.array([[0, 8, 4, 0]]), 2).tolist()
    [[2, 1]]
    """
    order_LE = np.lexsort((saved_at_LE, -unsaved_LE), axis=-1)  # stable: by class in the end
    return order_LE[:, :k]


def everything(num_layers: int, num_classes: int) -> Int[np.ndarray, "L E"]:
    """All classes of all layers, int64 ``[L, E]``: a full checkpoint."""
    return np.broadcast_to(np.arange(num_classes), (num_layers, num_classes))


def partial_bytes(dense_bytes: float, expert_bytes: float, k: int, num_classes: int) -> float:
    """C_pec, the bytes of a checkpoint of K of E experts: P_dense + K/E * P_expert, weights and moments of each.

    Args:
        dense_bytes: bytes of the dense part.
        expert_bytes: bytes of all experts.
        k: experts of a layer that are saved.
        num_classes: experts of a layer.

    >>> round(partial_bytes(0.12 + 0.02, 0.74 + 0.12, 1, 16), 3)  # the paper's shares of GPT-350M-16E
    0.194
    """
    return dense_bytes + expert_bytes * k / num_classes
