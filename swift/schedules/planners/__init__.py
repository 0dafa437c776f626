"""Planners, which turn a problem into a schedule; ``swift.schedules.registry`` lists them by name.

- ``adaptive`` is ReCycle's planner. ``search`` tries many assignments of failed workers' micro-batches to peers, and
  many policies by which ``list_scheduling`` orders the ops.
- ``lockstep`` plans for execution as one SPMD program, and ``v`` for two runs of blocks per worker.
- ``baselines`` has the established schedules without failures. ``swift.schedules.milp`` is an exact planner.
"""
