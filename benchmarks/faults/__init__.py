"""Fault campaigns: break real runs in every known way, and judge the outcome each time.

A *campaign* is made of *episodes*, each the life of one run directory: a run is started, *volleys* of one to four
faults hit it, and after each a judge that shares no code with Swift reads the run's files. `docs/faults.md` describes
the faults.
"""
