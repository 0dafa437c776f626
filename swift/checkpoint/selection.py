"""Choice of the experts that a partial checkpoint saves, its size, and the tokens that it loses.

All of it is MoC-System's (arXiv 2408.04307): partial checkpoints of experts (PEC), the proportion of lost tokens (PLT),
which ``TokenUpdateCounter`` counts, and Dynamic-K.

Legend: L MoE layers of the model, E expert classes, K classes of a layer that a checkpoint saves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int


def initial_rotation(num_layers: int, num_classes: int, k: int) -> Int[np.ndarray, " L"]:
    """The class with which each layer's round begins, int64 ``[L]``: K classes after that of the layer below.

    Layers are interleaved so that, where each rank holds classes of its own, all ranks write equally much.

    >>> initial_rotation(3, 4, 2).tolist()
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


def next_rotation(turn_L: Int[np.ndarray, " L"], num_classes: int, k: int) -> Int[np.ndarray, " L"]:
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


@dataclass(frozen=True)
class TokenUpdateCounter:
    """Token updates of a run so far.

    An expert is updated by every (token, choice) pair that is routed to it and not dropped. Losses follow from what an
    expert's state *contains*: the updates of all iterations that led to it. So nothing counts as lost twice, however
    often a run falls back, and iterations that are run again are not lost.

    An iteration without a record counts as one that updated every expert as often as possible, and routed nothing. So
    the number of lost updates is at least the true one, and ``plt`` is an upper bound.

    Attributes:
        contained_LE: int64, updates that the experts' state contains.
        routed_L: int64, pairs routed so far, dropped or not: T_i * topk_i.
        lost_L: int64, updates lost in all faults: the sum over j of L_ij.
        num_faults: number of restores.
        num_uncounted: iterations in the state without a record.
    """

    contained_LE: np.ndarray
    routed_L: np.ndarray
    lost_L: np.ndarray
    num_faults: int = 0
    num_uncounted: int = 0

    @classmethod
    def none(cls, num_layers: int, num_classes: int) -> "TokenUpdateCounter":
        """The tally before the first iteration."""
        shape = (num_layers, num_classes)
        return cls(np.zeros(shape, np.int64), np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64))

    def count(self, popularity_LE: Any, dropped_LE: Any) -> "TokenUpdateCounter":
        """The tally after one more iteration.

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
        """The tally after more iterations, of which there is no record.

        Args:
            num_iterations: number of these iterations.
            most_updates: largest number of updates of an expert in one iteration.
        """
        contained_LE = self.contained_LE + num_iterations * most_updates
        return replace(self, contained_LE=contained_LE, num_uncounted=self.num_uncounted + num_iterations)

    def restored(self, contained_LE: Int[np.ndarray, "L E"]) -> "TokenUpdateCounter":
        """The tally after a fault and a restore.

        Args:
            contained_LE: updates that the restored copies contain.
        """
        return self.fell_back(self.contained_LE - contained_LE)

    def fell_back(self, lost_LE: Int[np.ndarray, "L E"]) -> "TokenUpdateCounter":
        """The tally after a fault that set back only some slices of experts.

        Args:
            lost_LE: updates that those slices no longer contain, weighted by their share of the expert.
        """
        assert (lost_LE >= 0).all(), "a copy is newer than the state"
        contained_LE, lost_L = self.contained_LE - lost_LE, self.lost_L + lost_LE.sum(axis=1)
        return replace(self, contained_LE=contained_LE, lost_L=lost_L, num_faults=self.num_faults + 1)

    @property
    def num_lost(self) -> int:
        """Updates lost in all layers."""
        return int(self.lost_L.sum())

    @property
    def plt(self) -> float:
        """The proportion of lost tokens: the mean over layers of lost updates over routed pairs."""
        if not self.lost_L.size:
            return 0.0
        return float(np.mean(self.lost_L / np.maximum(self.routed_L, 1)))

    def to_json(self) -> dict[str, Any]:
        """The tally as JSON."""
        arrays = {name: getattr(self, f"{name}_L").tolist() for name in ("routed", "lost")}
        numbers = {"num_faults": self.num_faults, "num_uncounted": self.num_uncounted}
        return arrays | {"contained": self.contained_LE.tolist(), **numbers}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], num_classes: int) -> "TokenUpdateCounter":
        """The inverse of ``to_json``."""
        contained_LE = np.asarray(fields["contained"], np.int64).reshape(len(fields["contained"]), num_classes)
        routed_L, lost_L = (np.asarray(fields[name], np.int64) for name in ("routed", "lost"))
        return cls(contained_LE, routed_L, lost_L, fields["num_faults"], fields.get("num_uncounted", 0))


def dynamic_k(k: int, plt: float, budget: float | None, num_classes: int) -> int:
    """K after a fault: doubled, up to all classes, where the proportion of lost tokens exceeds its budget.

    Args:
        k: K before the fault.
        plt: proportion of lost tokens, including this fault.
        budget: proportion above which K doubles; None: K stays.
        num_classes: E.

    >>> [dynamic_k(k, plt, 0.0375, 6) for k, plt in ((1, 0.03), (1, 0.04), (4, 0.04), (6, 0.04))]
    [1, 2, 6, 6]
    """
    return k if budget is None or plt <= budget else min(2 * k, num_classes)
