"""The exact planner, by mixed-integer programs, and proofs of how near to the best a period is.

``proof`` asks ``model`` whether a period is possible, or ``chunks`` where workers hold several chunks; ``model``
builds and solves the mixed-integer programs.
"""
