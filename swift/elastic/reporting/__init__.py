"""Reports of a run of several processes: the journal of its events, the timing of recoveries, goodput, the display."""
