"""The proportion of lost tokens, and Dynamic-K (MoC-System, arXiv 2408.04307: PLT, Dynamic-K).

Legend: L MoE layers of the model, E expert classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True)
class Tally:
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
    def none(cls, num_layers: int, num_classes: int) -> "Tally":
        """The tally before the first iteration."""
        shape = (num_layers, num_classes)
        return cls(np.zeros(shape, np.int64), np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64))

    def count(self, popularity_LE: Any, dropped_LE: Any) -> "Tally":
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

    def uncounted(self, num_iterations: int, most_updates: int) -> "Tally":
        """The tally after more iterations, of which there is no record.

        Args:
            num_iterations: number of these iterations.
            most_updates: largest number of updates of an expert in one iteration.
        """
        contained_LE = self.contained_LE + num_iterations * most_updates
        return replace(self, contained_LE=contained_LE, num_uncounted=self.num_uncounted + num_iterations)

    def restored(self, contained_LE: Int[np.ndarray, "L E"]) -> "Tally":
        """The tally after a fault and a restore.

        Args:
            contained_LE: updates that the restored copies contain.
        """
        return self.fell_back(self.contained_LE - contained_LE)

    def fell_back(self, lost_LE: Int[np.ndarray, "L E"]) -> "Tally":
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
    def from_json(cls, fields: Mapping[str, Any], num_classes: int) -> "Tally":
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
