"""What a schedule is worth: period, makespan, bubbles."""

import numpy as np

from swift.schedules.schedule import Schedule


def iteration_ends(schedule: Schedule) -> np.ndarray:
    """float64[K]: when the last op of every iteration ends."""
    ends = np.zeros(schedule.problem.num_iterations)
    np.maximum.at(ends, schedule.iteration, schedule.end)
    return ends


def makespan(schedule: Schedule) -> float:
    """When the last op of the window ends; the first starts at 0."""
    return float(schedule.end.max())


def period(schedule: Schedule) -> float:
    """Steady-state time of one iteration, from the end of the first to that of the last; or a lone one's makespan."""
    ends = iteration_ends(schedule)
    return float(ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else float(ends[0])


def window_period(schedule: Schedule) -> float:
    """Time of one iteration where the window drains before the next one starts."""
    return makespan(schedule) / schedule.problem.num_iterations


def bubble_share(schedule: Schedule) -> float:
    """Share of the live workers' time in the steady state in which they run nothing."""
    busy = float((schedule.end - schedule.start).sum()) / schedule.problem.num_iterations
    num_live = sum(len(peers) for peers in schedule.problem.survivors)
    return max(0.0, 1.0 - busy / (num_live * period(schedule)))
