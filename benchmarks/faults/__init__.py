"""Breaks real runs in every way that is known here, and judges each time what came of it.

A *campaign* is made of *episodes*, each the life of one run directory: a run is started, *volleys* of one to four
faults hit it, and after each a judge that shares no code with Swift reads what the run has left. `docs/faults.md` says
what is tried.
"""
