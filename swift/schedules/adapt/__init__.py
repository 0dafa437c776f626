"""Plans after a failure, compared by cost: re-routing, moved roles, or re-partitioned pipelines of unequal length.

- ``layouts`` enumerates the blocks that survivors could hold.
- ``mixture`` decides how many micro-batches each pipeline takes and where the remainder is re-routed, ``ordering`` the
  order of ops.
- ``moves`` computes what has to be copied, and whether that pays during a run. ``choice`` takes the best plan.
"""
