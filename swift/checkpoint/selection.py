"""Partial checkpoints: which experts to save, the resulting size, and the token updates that a restore loses.

The methods are from MoC-System (arXiv 2408.04307): partial expert checkpoints (PEC), the proportion of lost tokens
(PLT), which ``TokenUpdateCounter`` tracks, and Dynamic-K.

Legend: L MoE layers of the model, E expert classes, K classes of a layer that a checkpoint saves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int


def initial_rotation(num_layers: int, num_classes: int, k: int) -> Int[np.ndarray, " L"]:
    """Returns the class that each layer saves first, int64 ``[L]``, offset by K classes from the previous layer.

    The offset balances the load: if ranks hold different classes, all ranks write about the same amount.

    >>> initial_rotation(3, 4, 2).tolist()
    [0, 2, 0]
    """
    return np.arange(num_layers) * k % max(num_classes, 1)


def sequential(turn_L: Int[np.ndarray, " L"], num_classes: int, k: int) -> Int[np.ndarray, "L K"]:
    """Returns the next K classes of each layer in round-robin order, int64 ``[L, K]``.

    Args:
        turn_L: the next class of each layer.
        num_classes: number of expert classes, E.
        k: number of classes to choose in each layer, at most E.

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
        unsaved_LE: token updates of each class since its last save.
        saved_at_LE: iteration of each class's last save.
        k: number of classes to choose in each layer, at most E.

    >>> load_aware(np.array([[5, 9, 9, 0]]), np.array([[0, 8, 4, 0]]), 2).tolist()
    [[2, 1]]
    """
    order_LE = np.lexsort((saved_at_LE, -unsaved_LE), axis=-1)  # the sort is stable, so ties are in order of class
    return order_LE[:, :k]


def everything(num_layers: int, num_classes: int) -> Int[np.ndarray, "L E"]:
    """Returns all classes of all layers, for a full checkpoint, int64 ``[L, E]``."""
    return np.broadcast_to(np.arange(num_classes), (num_layers, num_classes))


def partial_bytes(dense_bytes: float, expert_bytes: float, k: int, num_classes: int) -> float:
    """Computes a partial checkpoint's size in bytes, with K of E experts: C_pec = P_dense + K/E * P_expert.

    Args:
        dense_bytes: bytes of the dense part, including moments.
        expert_bytes: bytes of all experts, including moments.
        k: number of experts saved in each layer, K.
        num_classes: number of experts in each layer, E.

    >>> round(partial_bytes(0.12 + 0.02, 0.74 + 0.12, 1, 16), 3)  # the paper's shares of GPT-350M-16E
    0.194
    """
    return dense_bytes + expert_bytes * k / num_classes


@dataclass(frozen=True)
class TokenUpdateCounter:
    """Counts a run's token updates, and how many of them were lost in faults.

    An expert is updated by every (token, choice) pair that is routed to it and not dropped. A fault's loss is the
    difference between the updates that the expert's state *contains* before and after the fault. No update is therefore
    counted as lost twice, however often a run falls back, and iterations that are run again are not counted as lost.

    An iteration without a record is counted as if it had updated every expert as often as possible and routed nothing.
    The count of lost updates is then never too low, and ``plt`` is an upper bound.

    Attributes:
        contained_LE: int64, updates that each expert's state contains.
        routed_L: int64, pairs routed so far, whether dropped or not: T_i * topk_i.
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
            dropped_LE: pairs routed to each expert that were dropped.
        """
        if not self.contained_LE.size:  # there are no experts, or they are not saved one by one
            return self
        popularity_LE, dropped_LE = np.asarray(popularity_LE, np.int64), np.asarray(dropped_LE, np.int64)
        return replace(
            self,
            contained_LE=self.contained_LE + popularity_LE - dropped_LE,
            routed_L=self.routed_L + popularity_LE.sum(axis=1),
        )

    def uncounted(self, num_iterations: int, most_updates: int) -> "TokenUpdateCounter":
        """Returns the counter after iterations without a record, for example because a crash lost the metrics.

        Args:
            num_iterations: number of such iterations.
            most_updates: maximum number of updates of an expert in one iteration.
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
        """Returns the counter after a fault that replaced some experts or slices of experts by older copies.

        Args:
            lost_LE: updates of each expert that were lost, weighted by the share of the expert that was replaced.
        """
        assert (lost_LE >= 0).all(), "a copy is newer than the state"
        contained_LE, lost_L = self.contained_LE - lost_LE, self.lost_L + lost_LE.sum(axis=1)
        return replace(self, contained_LE=contained_LE, lost_L=lost_L, num_faults=self.num_faults + 1)

    @property
    def num_lost(self) -> int:
        """Updates lost in all faults, summed over all layers."""
        return int(self.lost_L.sum())

    @property
    def plt(self) -> float:
        """Proportion of lost tokens (PLT): lost updates per routed pair, averaged over the layers."""
        if not self.lost_L.size:
            return 0.0
        return float(np.mean(self.lost_L / np.maximum(self.routed_L, 1)))

    def to_json(self) -> dict[str, Any]:
        """Returns the counter as JSON fields, for ``from_json``."""
        arrays = {name: getattr(self, f"{name}_L").tolist() for name in ("routed", "lost")}
        numbers = {"num_faults": self.num_faults, "num_uncounted": self.num_uncounted}
        return arrays | {"contained": self.contained_LE.tolist(), **numbers}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], num_classes: int) -> "TokenUpdateCounter":
        """Parses the fields of ``to_json``; ``num_uncounted`` is 0 in manifests written before it existed."""
        contained_LE = np.asarray(fields["contained"], np.int64).reshape(len(fields["contained"]), num_classes)
        routed_L, lost_L = (np.asarray(fields[name], np.int64) for name in ("routed", "lost"))
        return cls(contained_LE, routed_L, lost_L, fields["num_faults"], fields.get("num_uncounted", 0))


def dynamic_k(k: int, plt: float, budget: float | None, num_classes: int) -> int:
    """Returns K after a fault: doubled, up to E, if the proportion of lost tokens exceeds its budget (Dynamic-K).

    Args:
        k: experts saved in each layer before the fault, K.
        plt: proportion of lost tokens so far, including this fault.
        budget: proportion above which K doubles; None to keep K fixed.
        num_classes: number of expert classes, E.

    >>> [dynamic_k(k, plt, 0.0375, 6) for k, plt in ((1, 0.03), (1, 0.04), (4, 0.04), (6, 0.04))]
    [1, 2, 6, 6]
    """
    return k if budget is None or plt <= budget else min(2 * k, num_classes)
