"""Training by real processes, one for each worker, that may die and come back: the supervisor and its members."""
