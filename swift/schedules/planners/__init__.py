"""Planners, from a problem to a schedule.

``rerouting`` gives the micro-batches of failed workers to their peers. ``adaptive`` is ReCycle's planner, which tries
many policies (``search``) by ``list_scheduling``; ``lockstep`` plans for execution as one SPMD program; ``milp`` is
exact; ``baselines`` plan without failures; ``two_runs`` has the planner ``v``, for two runs of blocks a worker.
``registry`` lists them by name.
"""
