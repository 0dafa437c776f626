"""Events of a run: recorded, timed, and shown to people."""
