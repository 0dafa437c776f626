"""Names and chunk shapes of planners, and the interface for a user's own planner; importing this loads no planner."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

if TYPE_CHECKING:
    from swift.schedules.problem import Problem
    from swift.schedules.schedule import Schedule

PlannerName: TypeAlias = Literal["adaptive", "lockstep", "milp", "gpipe", "one_f_one_b", "zero_bubble", "v"]
PLANNER_NAMES: tuple[PlannerName, ...] = get_args(PlannerName)
FAULT_FREE = frozenset({"gpipe", "one_f_one_b", "zero_bubble"})
"""Planners that accept only problems without failures."""


def v_shape(num_stages: int) -> tuple[int, ...]:
    """Returns the stage of each chunk in a V; a single stage holds one chunk.

    >>> v_shape(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (0,) if num_stages == 1 else (*range(num_stages), *reversed(range(num_stages)))


SHAPES: Mapping[str, Callable[[int], tuple[int, ...]]] = {"v": v_shape}
"""Planners with several runs of blocks per worker, mapped to a function: number of stages -> stage of each chunk."""


class CustomPlanner(Protocol):
    """Interface of a user-defined planner. Make it a frozen dataclass, so that a configuration can refer to it.

    Its schedules are verified before they run. Two functions are useful for writing a planner: ``time_round`` computes
    the times of ops in a given order, and ``Schedule.from_round`` repeats a round for all iterations.
    """

    @property
    def name(self) -> str:
        """Short name of the planner, for messages."""

    def plan(self, problem: "Problem") -> "Schedule":
        """Plans a problem; must be deterministic. The failures at each stage are in the first pipelines.

        Raises:
            SettingError: the planner cannot plan for this problem.
        """


def shape_of(planner: str | CustomPlanner, num_stages: int) -> tuple[int, ...]:
    """Returns the stage of each chunk that a planner expects in every pipeline: one chunk per stage for most planners.

    >>> shape_of("adaptive", 3), shape_of("v", 3)
    ((0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    shape = SHAPES.get(planner) if isinstance(planner, str) else None
    return tuple(range(num_stages)) if shape is None else shape(num_stages)
