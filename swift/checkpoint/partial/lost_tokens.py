"""Proportion of lost tokens, and what it does to K (MoC-System, arXiv 2408.04307: PLT, Dynamic-K).

Legend: L MoE layers of the model, E classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tally:
    """Token updates of a run so far.

    An expert is updated by every (token, choice) pair that is routed to it and not dropped. What is lost is told by
    what an expert's state *contains*: the updates of all iterations that went into it and into no copy that was left
    behind. So nothing counts as lost twice, however often a run falls back, and replayed iterations are not lost.

    An iteration may have no record: then every expert is taken to contain as many updates of it as there could be, and
    nothing is taken to have been routed. What is counted as lost is then at least what was lost, and ``plt`` an upper
    bound of the proportion.

    Attributes:
        contained_LE: updates that the experts' state contains, int64.
        routed_L: pairs that were routed so far, dropped or not: T_i * topk_i, int64.
        lost_L: updates lost in all faults, the sum over j of L_ij, int64.
        num_faults: how often the state was restored.
        num_uncounted: iterations in the state that had no record when they were to be counted.
    """

    contained_LE: np.ndarray
    routed_L: np.ndarray
    lost_L: np.ndarray
    num_faults: int = 0
    num_uncounted: int = 0

    @classmethod
    def none(cls, num_layers: int, num_classes: int) -> "Tally":
        """Before the first iteration."""
        shape = (num_layers, num_classes)
        return cls(np.zeros(shape, np.int64), np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64))

    def count(self, popularity_LE: Any, dropped_LE: Any) -> "Tally":
        """After one more iteration.

        Args:
            popularity_LE: pairs routed to each class, as in ``metrics.jsonl``.
            dropped_LE: those of them that were dropped.
        """
        if not self.contained_LE.size:  # no experts, or none that are saved one by one
            return self
        popularity_LE, dropped_LE = np.asarray(popularity_LE, np.int64), np.asarray(dropped_LE, np.int64)
        return replace(
            self,
            contained_LE=self.contained_LE + popularity_LE - dropped_LE,
            routed_L=self.routed_L + popularity_LE.sum(axis=1),
        )

    def uncounted(self, num_iterations: int, most_updates: int) -> "Tally":
        """After more iterations of which there is no record.

        Args:
            num_iterations: how many.
            most_updates: that an expert may get in an iteration.
        """
        contained_LE = self.contained_LE + num_iterations * most_updates
        return replace(self, contained_LE=contained_LE, num_uncounted=self.num_uncounted + num_iterations)

    def restored(self, contained_LE: np.ndarray) -> "Tally":
        """After a fault.

        Args:
            contained_LE: updates that the restored copies contain.
        """
        return self.fell_back(self.contained_LE - contained_LE)

    def fell_back(self, lost_LE: np.ndarray) -> "Tally":
        """After a fault that left the state where it was, but for some slices of experts.

        Args:
            lost_LE: updates that those slices no longer contain, each for as much of its expert as it is.
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
        """Lists and numbers."""
        arrays = {name: getattr(self, f"{name}_L").tolist() for name in ("routed", "lost")}
        numbers = {"num_faults": self.num_faults, "num_uncounted": self.num_uncounted}
        return arrays | {"contained": self.contained_LE.tolist(), **numbers}

    @classmethod
    def from_json(cls, said: Mapping[str, Any], num_classes: int) -> "Tally":
        """The inverse of ``to_json``."""
        contained_LE = np.asarray(said["contained"], np.int64).reshape(len(said["contained"]), num_classes)
        routed_L, lost_L = (np.asarray(said[name], np.int64) for name in ("routed", "lost"))
        return cls(contained_LE, routed_L, lost_L, said["num_faults"], said.get("num_uncounted", 0))


def dynamic_k(k: int, plt: float, budget: float | None, num_classes: int) -> int:
    """K after a fault: doubled, up to all classes, where the proportion of lost tokens exceeds its budget.

    Args:
        k: until now.
        plt: the proportion of lost tokens, this fault included.
        budget: what it should stay under; None: K stays.
        num_classes: E.

    >>> [dynamic_k(k, plt, 0.0375, 6) for k, plt in ((1, 0.03), (1, 0.04), (4, 0.04), (6, 0.04))]
    [1, 2, 6, 6]
    """
    return k if budget is None or plt <= budget else min(2 * k, num_classes)
