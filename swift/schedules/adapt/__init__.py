"""Plans after a failure, by what they cost: re-routing, moved roles, or pipelines of unequal length, cut anew.

``layouts`` says which blocks the survivors could hold, ``mixture`` how many micro-batches each pipeline takes and
where the remainder is re-routed, ``ordering`` in which order the ops run; ``moves`` says what has to be copied, and
whether that pays during a run; ``choice`` takes the best of all ways.
"""
