"""Extraction of the iteration that a schedule repeats.

K iterations, D pipelines, M micro-batches of a pipeline, P chunks, 3 the kinds F, B, W.
"""

import numpy as np

from swift.schedules.measures import makespan
from swift.schedules.memory import time_tolerance
from swift.schedules.ops import Kind
from swift.schedules.schedule import Round, Schedule


def round_of(schedule: Schedule) -> Round:
    """Extracts the iteration that a valid schedule repeats: the inverse of ``Schedule.from_round``.

    The result is exact to the bit if the first op starts at 0. A window of one iteration does not determine the period,
    which is then its makespan.
    """
    problem = schedule.problem
    K, rows_3KDMP = problem.num_iterations, schedule.row_3KDMP
    is_u, update_KP = schedule.kind == Kind.U, np.full((K, problem.num_chunks), np.nan)
    executor_3KDMP = np.where(rows_3KDMP < 0, -1, schedule.worker[rows_3KDMP] // problem.num_stages)
    start_3KDMP = np.where(rows_3KDMP < 0, np.nan, schedule.start[rows_3KDMP])
    update_KP[schedule.iteration[is_u], schedule.chunk[is_u]] = schedule.start[is_u]
    starts_K = np.nanmin(start_3KDMP, (0, 2, 3, 4))
    period = float(starts_K[1] - starts_K[0]) if K > 1 else makespan(schedule)
    shift_K, tolerance = period * np.arange(K), time_tolerance(schedule)
    repeats = (
        np.all(executor_3KDMP == executor_3KDMP[0, 0])
        and np.allclose(
            start_3KDMP, start_3KDMP[:, :1] + shift_K[:, None, None, None], rtol=0, atol=tolerance, equal_nan=True
        )
        and np.allclose(update_KP, update_KP[0] + shift_K[:, None], rtol=0, atol=tolerance, equal_nan=True)
    )
    assert repeats, "the schedule does not repeat one iteration"
    return Round(executor_3KDMP[0, 0], start_3KDMP[:, 0], update_KP[0], period)
