"""DeepSeek's expert-parallelism load balancer, EPLB, in NumPy, implemented from its published description.

*Replicas*: the next one goes to the expert with the largest load per replica; ties go to the first expert. *Packing*:
items, in descending order of load, each go to the least loaded pack that has room. The global policy does both with
all ranks. The hierarchical one first packs groups of neighbouring experts to nodes, then does both within each node.
"""

import numpy as np


def eplb(
    load_E: np.ndarray, num_ranks: int, slots_per_rank: int, num_groups: int = 1, num_nodes: int = 1
) -> np.ndarray:
    """Places the experts of a layer by their loads, int[N, S]; with one node, by the global policy."""
    load_E = load_E.astype(float)
    group_size = len(load_E) // num_groups
    group_load_G = load_E.reshape(num_groups, group_size).sum(axis=1)
    ranks_of_node, nodes = num_ranks // num_nodes, []
    for groups in _pack(group_load_G, num_nodes):
        expert_X = np.concatenate([group * group_size + np.arange(group_size) for group in groups])
        item_M, replicas_X = _replicate(load_E[expert_X], ranks_of_node * slots_per_rank)
        ranks = _pack((load_E[expert_X] / replicas_X)[item_M], ranks_of_node)
        nodes.append(expert_X[item_M[np.array(ranks)]])
    return np.concatenate(nodes)


def _replicate(load_X: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each replica's expert, int[M], with additional replicas at the end; and each expert's replica count."""
    expert_M, replicas_X = list(range(len(load_X))), np.ones(len(load_X), int)
    for _ in range(num_slots - len(load_X)):
        hottest = int(np.argmax(load_X / replicas_X))
        replicas_X[hottest] += 1
        expert_M.append(hottest)
    return np.array(expert_M), replicas_X


def _pack(weight_M: np.ndarray, num_packs: int) -> list[list[int]]:
    """Divides items among packs, with the same number of items in each."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    load_P, size = [0.0] * num_packs, len(weight_M) // num_packs
    for item in np.argsort(-weight_M, kind="stable"):
        pack = min((pack for pack in range(num_packs) if len(packs[pack]) < size), key=load_P.__getitem__)
        packs[pack].append(int(item))
        load_P[pack] += weight_M[item]
    return packs


def largest_rank_load(load_E: np.ndarray, placement_NS: np.ndarray) -> float:
    """Computes the load of the most loaded rank if the replicas of an expert share its load evenly."""
    replicas_E = np.bincount(placement_NS.ravel(), minlength=len(load_E))
    return float((load_E / replicas_E)[placement_NS].sum(axis=1).max())
