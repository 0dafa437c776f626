"""Performance measures of a schedule: period, makespan, bubbles."""

import numpy as np

from swift.schedules.schedule import Schedule


def iteration_ends(schedule: Schedule) -> np.ndarray:
    """End times of all iterations, float64[K]."""
    ends = np.zeros(schedule.problem.num_iterations)
    np.maximum.at(ends, schedule.iteration, schedule.end)
    return ends


def makespan(schedule: Schedule) -> float:
    """End time of the window's last op; the first op starts at 0."""
    return float(schedule.end.max())


def period(schedule: Schedule) -> float:
    """Mean time of an iteration in the steady state, from the end of the first to that of the last.

    For a single iteration it is the makespan.
    """
    ends = iteration_ends(schedule)
    return float(ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else float(ends[0])


def window_period(schedule: Schedule) -> float:
    """Mean time of an iteration if the window drains before the next one starts."""
    return makespan(schedule) / schedule.problem.num_iterations


def bubble_share(schedule: Schedule) -> float:
    """Share of the live workers' time in the steady state in which they are idle."""
    busy = float((schedule.end - schedule.start).sum()) / schedule.problem.num_iterations
    return max(0.0, 1.0 - busy / (len(schedule.problem.live_workers) * period(schedule)))
