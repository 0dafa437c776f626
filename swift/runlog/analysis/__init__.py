"""Analysis of a run's record: history on one clock, incidents, measures, presence of workers, use of time."""
