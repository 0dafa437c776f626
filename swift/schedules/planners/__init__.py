"""Planners, from a problem to a schedule; ``swift.schedules.registry`` lists them by name.

``adaptive`` is ReCycle's planner: ``search`` tries many ways to give the micro-batches of failed workers to their
peers, and many policies by which ``list_scheduling`` orders the ops. ``lockstep`` plans for execution as one SPMD
program, ``v`` for two runs of blocks a worker, and ``baselines`` without failures. ``swift.schedules.milp`` is exact.
"""
