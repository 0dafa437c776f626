"""Checks that a model can be trained on a placement: every expert has a slot, and every slot an expert.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank.
"""

import math

import numpy as np
from jaxtyping import Int


def unsound(replicas_LE: Int[np.ndarray, "L E"], num_slots: int) -> str | None:
    """Describes the first fault of a placement, given its replica counts; None if there is none.

    Args:
        replicas_LE: int[L, E], slots that hold each expert; a slot with an invalid number counts for no expert.
        num_slots: slots of a layer.

    >>> unsound(np.array([[2, 2, 0]]), num_slots=4)
    'expert 2 of 0 to 2 has no slot in layer 0'
    >>> unsound(np.array([[2, 1, 1]]), num_slots=6)
    '2 slots of layer 0 hold none of the experts 0 to 2'
    """
    for layer, replicas_E in enumerate(np.asarray(replicas_LE)):
        without = np.flatnonzero(replicas_E == 0)
        if without.size:
            return f"expert {without[0]} of 0 to {len(replicas_E) - 1} has no slot in layer {layer}"
        stray = num_slots - int(replicas_E.sum())
        if stray:
            return f"{stray} slots of layer {layer} hold none of the experts 0 to {len(replicas_E) - 1}"
    return None


def unsound_placement(placement_LNS: Int[np.ndarray, "L N S"], num_classes: int) -> str | None:
    """Describes the first fault of a placement, given the expert in every slot; None if there is none."""
    num_slots = math.prod(placement_LNS.shape[1:])
    placement_LM = placement_LNS.reshape(-1, num_slots)
    replicas_LE = [np.count_nonzero(placement_LM == number, axis=1) for number in range(num_classes)]
    return unsound(np.stack(replicas_LE, axis=1), num_slots)
