"""Planner of two runs of blocks a worker, in a V: ``v`` searches, ``due_times`` schedules each of its candidates."""

from swift.schedules.planners.two_runs.v import v, v_shape

__all__ = ["v", "v_shape"]
