"""Plans after a failure, by what they cost: re-routing, moved roles, or pipelines of unequal length, cut anew.

``layouts`` says which blocks the survivors could hold, ``division`` how many micro-batches each pipeline takes and
where the remainder is re-routed, ``ordering`` in which order the ops run; ``moving`` says what has to be copied, and
``choice`` takes the best of all ways. ``payoff`` says whether moving blocks pays during a run.
"""
