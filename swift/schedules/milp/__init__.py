"""The exact planner, by mixed-integer programs, with proofs of how close to the optimum a period is.

``proof`` searches for the shortest period. It asks ``model``, which builds and solves the mixed-integer programs,
whether a period is possible; or ``chunks`` where workers hold several chunks.
"""
