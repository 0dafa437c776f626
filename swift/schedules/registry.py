"""Planners by name. Each turns a problem into a schedule that ``verify`` accepts."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace

from swift.errors import SettingError, first_line
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import gpipe, one_f_one_b, zero_bubble
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.planners.names import CustomPlanner, shape_of
from swift.schedules.problem import Chunk, Problem
from swift.schedules.rules import ScheduleError, verify
from swift.schedules.schedule import Schedule

Planner = Callable[[Problem], Schedule]


def _milp(problem: Problem) -> Schedule:
    # Imported on use: only ``milp`` needs the solver.
    from swift.schedules.milp.proof import milp

    return milp(problem)


def _v(problem: Problem) -> Schedule:
    # Imported on use: it is the largest planner, and few runs need it.
    from swift.schedules.planners.v import v

    return v(problem)


PLANNERS: Mapping[str, Planner] = {
    "adaptive": adaptive,
    "lockstep": lockstep,
    "milp": _milp,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "zero_bubble": zero_bubble,
    "v": _v,
}


def plan_with(planner: str | CustomPlanner, problem: Problem) -> Schedule:
    """Plans a problem with a built-in planner or a user's own; verifies the schedule of a user's planner.

    Args:
        planner: name in ``PLANNERS``, or a user's planner.
        problem: problem to plan.

    Raises:
        SettingError: the planner cannot plan this problem, or a user's planner raised an exception or returned a
            schedule that is not valid.
    """
    if isinstance(planner, str):
        return PLANNERS[planner](problem)
    try:
        schedule = planner.plan(problem)
    except SettingError:
        raise
    except Exception as error:  # the user's own code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"plan raises {type(error).__name__} ({last.filename.rpartition('/')[2]}:{last.lineno})"
        raise SettingError("planner", planner.name, f"{where}: {first_line(error)}") from error
    try:
        verify(schedule)
    except ScheduleError as error:
        raise SettingError("planner", planner.name, f"must make valid schedules: {error}") from error
    return schedule


def with_chunk_shape(planner: str | CustomPlanner, problem: Problem) -> Problem:
    """Cuts each stage into as many equal runs of blocks as a planner is designed for.

    Args:
        planner: name in ``PLANNERS``, or a user's planner.
        problem: plain problem in which all chunks cost the same.
    """
    shape = shape_of(planner, problem.num_stages)
    if len(shape) == problem.num_stages:
        return problem
    assert problem.is_plain, "the stages are cut already"
    assert not problem.chunks, "the stages are not alike"
    halves = (Chunk.of_size(problem.num_stages / len(shape)),) * len(shape)
    return replace(problem, chunks=halves, stage_of_chunk=(shape,) * problem.num_pipelines)
