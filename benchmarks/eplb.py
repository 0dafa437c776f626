"""DeepSeek's expert-parallelism load balancer: its global policy, reimplemented in NumPy from its description.

Greedy replicas: the next one goes to the expert with the largest load per replica. Greedy packing: the replicas, the
most loaded first, each go to the rank with the least load that has a free slot.
"""

import numpy as np


def eplb(load_E: np.ndarray, num_ranks: int, slots_per_rank: int) -> np.ndarray:
    """Places the experts of a layer by their loads, int[N, S]."""
    load_E = load_E.astype(float)
    replicas_E = np.ones(len(load_E), int)
    for _ in range(num_ranks * slots_per_rank - len(load_E)):
        replicas_E[np.argmax(load_E / replicas_E)] += 1
    class_M = np.repeat(np.arange(len(load_E)), replicas_E)
    weight_M = (load_E / replicas_E)[class_M]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load_N = np.zeros(num_ranks)
    for slot in np.argsort(-weight_M, kind="stable"):
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < slots_per_rank]
        rank = min(free, key=lambda rank: load_N[rank])
        ranks[rank].append(class_M[slot])
        load_N[rank] += weight_M[slot]
    return np.array(ranks)


def largest_rank_load(load_E: np.ndarray, placement_NS: np.ndarray) -> float:
    """Load of the most loaded rank if the replicas of an expert share its load evenly."""
    replicas_E = np.bincount(placement_NS.ravel(), minlength=len(load_E))
    return float((load_E / replicas_E)[placement_NS].sum(axis=1).max())
