"""Partial checkpoints: which experts to save, the size that results, and the tokens that a restore loses.

The methods are MoC-System's (arXiv 2408.04307): partial expert checkpoints (PEC), the proportion of lost tokens (PLT),
which ``TokenUpdateCounter`` tracks, and Dynamic-K.

Legend: L MoE layers of the model, E expert classes, K classes of a layer that a checkpoint saves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int


def initial_rotation(num_layers: int, num_classes: int, k: int) -> Int[np.ndarray, " L"]:
    """Returns the class that each layer saves first, int64 ``[L]``: K classes after the layer below.

    The offset spreads the load: if ranks hold different classes, all ranks write equally much.

    >>> initial_rotation(3, 4, 2).tolist()
    [0, 2, 0]
    """
    return np.arange(num_layers) * k % max(num_classes, 1)


def sequential(turn_L: Int[np.ndarray, " L"], num_classes: int, k: int) -> Int[np.ndarray, "L K"]:
    """Returns the K classes of each layer whose turn it is (round robin), int64 ``[L, K]``.

    Args:
        turn_L: the next class of each layer.
        num_classes: E.
        k: at most E.

    >>> sequential(np.array([0, 3]), 4, 2).tolist()
    [[0, 1], [3, 0]]
    """
    return (turn_L[:, None] + np.arange(k)) % max(num_classes, 1)


def next_rotation(turn_L: Int[np.ndarray, " L"], num_classes: int, k: int) -> Int[np.ndarray, " L"]:
    """Returns each layer's next class, ``[L]``, after a sequential save of K classes."""
    return (turn_L + k) % max(num_classes, 1)


def load_aware(
    unsaved_LE: Int[np.ndarray, "L E"], saved_at_LE: Int[np.ndarray, "L E"], k: int
) -> Int[np.ndarray, "L K"]:
    """Returns the K classes of each layer with the most unsaved token updates, int64 ``[L, K]``.

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
    """Returns all classes of all layers, int64 ``[L, E]``: a full checkpoint."""
    return np.broadcast_to(np.arange(num_classes), (num_layers, num_classes))


def partial_bytes(dense_bytes: float, expert_bytes: float, k: int, num_classes: int) -> float:
    """Computes the bytes of a partial checkpoint, K of E experts: C_pec = P_dense + K/E * P_expert.

    Args:
        dense_bytes: bytes of the dense part, weights and moments.
        expert_bytes: bytes of all experts, weights and moments.
        k: experts saved in each layer.
        num_classes: experts in each layer.

    >>> round(partial_bytes(0.12 + 0.02, 0.74 + 0.12, 1, 16), 3)  # the paper's shares of GPT-350M-16E
    0.194
    """
    return dense_bytes + expert_bytes * k / num_classes


@dataclass(frozen=True)
class TokenUpdateCounter:
    """Counts a run's token updates, and how many of them faults have lost.

    An expert is updated by every (token, choice) pair that is routed to it and not dropped. A loss is the difference
    between the updates that the expert's state *contains* before a fault and after it. So no update counts as lost
    twice, however often a run falls back, and iterations that are run again are not lost.

    An iteration without a record counts as one that updated every expert as often as possible and routed nothing. The
    count of lost updates is then never too low, and ``plt`` is an upper bound.

    Attributes:
        contained_LE: int64, updates that each expert's state contains.
        routed_L: int64, pairs routed so far, dropped or not: T_i * topk_i.
        lost_L: int64, updates lost in all faults: the sum over faults j of L_ij.
        num_faults: number of restores and recoveries.
        num_uncounted: iterations that the state contains but that have no record.
    """

    contained_LE: np.ndarray
    routed_L: np.ndarray
    lost_L: np.ndarray
    num_faults: int = 0
    num_uncounted: int = 0

    @classmethod
    def none(cls, num_layers: int, num_classes: int) -> "TokenUpdateCounter":
        """Returns the counter before the first iteration."""
        shape = (num_layers, num_classes)
        return cls(np.zeros(shape, np.int64), np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64))

    def count(self, popularity_LE: Any, dropped_LE: Any) -> "TokenUpdateCounter":
        """Returns the counter after one more iteration.

        Args:
            popularity_LE: pairs routed to each expert, as in ``metrics.jsonl``.
            dropped_LE: pairs that were dropped.
        """
        if not self.contained_LE.size:  # no experts, or none that are saved one by one
            return self
        popularity_LE, dropped_LE = np.asarray(popularity_LE, np.int64), np.asarray(dropped_LE, np.int64)
        return replace(
            self,
            contained_LE=self.contained_LE + popularity_LE - dropped_LE,
            routed_L=self.routed_L + popularity_LE.sum(axis=1),
        )

    def uncounted(self, num_iterations: int, most_updates: int) -> "TokenUpdateCounter":
        """Returns the counter after iterations that left no record, as after a crash that lost the metrics.

        Args:
            num_iterations: number of such iterations.
            most_updates: largest number of updates of an expert in one iteration.
        """
        contained_LE = self.contained_LE + num_iterations * most_updates
        return replace(self, contained_LE=contained_LE, num_uncounted=self.num_uncounted + num_iterations)

    def restored(self, contained_LE: Int[np.ndarray, "L E"]) -> "TokenUpdateCounter":
        """Returns the counter after a fault and a restore.

        Args:
            contained_LE: updates that the restored copies contain.
        """
        return self.fell_back(self.contained_LE - contained_LE)

    def fell_back(self, lost_LE: Int[np.ndarray, "L E"]) -> "TokenUpdateCounter":
        """Returns the counter after a fault that set back some slices of experts.

        Args:
            lost_LE: updates that these slices no longer contain, weighted by the slices' share of the expert.
        """
        assert (lost_LE >= 0).all(), "a copy is newer than the state"
        contained_LE, lost_L = self.contained_LE - lost_LE, self.lost_L + lost_LE.sum(axis=1)
        return replace(self, contained_LE=contained_LE, lost_L=lost_L, num_faults=self.num_faults + 1)

    @property
    def num_lost(self) -> int:
        """Updates lost in all faults, over all layers."""
        return int(self.lost_L.sum())

    @property
    def plt(self) -> float:
        """Proportion of lost tokens (PLT): lost updates over routed pairs, averaged over the layers."""
        if not self.lost_L.size:
            return 0.0
        return float(np.mean(self.lost_L / np.maximum(self.routed_L, 1)))

    def to_json(self) -> dict[str, Any]:
        """Returns the counter as JSON, for ``from_json``."""
        arrays = {name: getattr(self, f"{name}_L").tolist() for name in ("routed", "lost")}
        numbers = {"num_faults": self.num_faults, "num_uncounted": self.num_uncounted}
        return arrays | {"contained": self.contained_LE.tolist(), **numbers}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], num_classes: int) -> "TokenUpdateCounter":
        """Reads the counter back from JSON; manifests written before ``num_uncounted`` existed have 0."""
        contained_LE = np.asarray(fields["contained"], np.int64).reshape(len(fields["contained"]), num_classes)
        routed_L, lost_L = (np.asarray(fields[name], np.int64) for name in ("routed", "lost"))
        return cls(contained_LE, routed_L, lost_L, fields["num_faults"], fields.get("num_uncounted", 0))


def dynamic_k(k: int, plt: float, budget: float | None, num_classes: int) -> int:
    """Returns K after a fault: doubled, up to E, if the proportion of lost tokens exceeds its budget (Dynamic-K).

    Args:
        k: K before the fault.
        plt: proportion of lost tokens so far, this fault included.
        budget: proportion above which K doubles; None: K never changes.
        num_classes: E.

    >>> [dynamic_k(k, plt, 0.0375, 6) for k, plt in ((1, 0.03), (1, 0.04), (4, 0.04), (6, 0.04))]
    [1, 2, 6, 6]
    """
    return k if budget is None or plt <= budget else min(2 * k, num_classes)
