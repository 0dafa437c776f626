"""Planners, from a problem to a schedule.

``search`` gives the micro-batches of failed workers to their peers. ``adaptive`` is ReCycle's planner, which tries many
policies (``search``) by ``list_scheduling``; ``lockstep`` plans for execution as one SPMD program;
``swift.schedules.milp`` is exact; ``baselines`` plan without failures; ``v`` has the planner ``v``, for two runs of
blocks a worker. ``swift.schedules.registry`` lists them by name.
"""
