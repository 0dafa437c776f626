"""Progress of a run, for people: a display on a terminal, lines in a log, and the time left."""
