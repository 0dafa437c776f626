"""Exact planner, by mixed-integer programs, which also proves how close to the optimum a period is.

``proof`` searches for the shortest period. ``model`` builds and solves the mixed-integer programs that decide whether a
period is possible. ``chunks`` replaces it for problems with several chunks per worker, unequal chunks or unequal
pipelines.
"""
