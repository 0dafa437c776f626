"""Three rules for the step that may be next: the first waits for all, and the last knows the future."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .town import RADIUS


class Rule(Protocol):
    """A rule of the order."""

    def blocker(self, agent: int, step_A: np.ndarray, place_A2: np.ndarray) -> int:
        """An agent for which another has to wait before its next step; -1: there is none.

        Args:
            agent: the agent that would go on.
            step_A: steps that each agent has done.
            place_A2: where each is after them.
        """


class Barrier:
    """Every agent waits until all have done its last step."""

    def blocker(self, agent: int, step_A: np.ndarray, place_A2: np.ndarray) -> int:
        """Finds the slowest agent, if it is behind."""
        del place_A2
        slowest = int(step_A.argmin())
        return slowest if step_A[slowest] < step_A[agent] else -1


class Reach:
    """An agent waits for those behind it that could come so near that it would see them."""

    def blocker(self, agent: int, step_A: np.ndarray, place_A2: np.ndarray) -> int:
        """Finds an agent that may be in sight by the time at which it would have caught up."""
        behind_A = step_A[agent] - step_A
        distance_A = np.abs(place_A2 - place_A2[agent]).max(axis=1)
        found = np.flatnonzero((behind_A > 0) & (distance_A <= RADIUS + behind_A))
        return int(found[0]) if found.size else -1


class Known:
    """An agent waits for those behind it that it will see: the oracle, which needs a run that has ended.

    Args:
        seen: agents that each agent saw at each step of that run, by step.
    """

    def __init__(self, seen: Sequence[Sequence[Sequence[int]]]):
        self._seen = seen

    def blocker(self, agent: int, step_A: np.ndarray, place_A2: np.ndarray) -> int:
        """Finds an agent that is behind, and will be seen."""
        del place_A2
        step = step_A[agent]
        return next((other for other in self._seen[step][agent] if step_A[other] < step), -1)
