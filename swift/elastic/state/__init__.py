"""State of a run that outlives its processes."""
