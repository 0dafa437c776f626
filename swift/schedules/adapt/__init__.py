"""Plans after a failure, compared by cost: re-routing, moved roles, or re-partitioned pipelines of unequal length.

- ``layouts`` enumerates possible assignments of blocks to survivors.
- ``mixture`` decides how many micro-batches each pipeline runs and where the remainder is re-routed. ``ordering``
  decides the order of ops.
- ``moves`` computes which blocks have to be copied, and whether copying them pays off during a run. ``choice`` chooses
  the best plan.
"""
