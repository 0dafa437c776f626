"""Analysis of the record of a run.

Its history on one clock, incidents, measures, the presence of workers, and the use of time.
"""

from swift.runlog.analysis.history import History, Stretch, history_of, names_in, number_in, stretches_of
from swift.runlog.analysis.incidents import Incident, moments_of
from swift.runlog.analysis.measures import measure, ratio, running_mean, scalars, steps_to_target
from swift.runlog.analysis.time_breakdown import CAUSES, spending_of
from swift.runlog.analysis.worker_presence import Presence, presences_of

__all__ = [
    "CAUSES",
    "History",
    "Incident",
    "Presence",
    "Stretch",
    "history_of",
    "measure",
    "moments_of",
    "names_in",
    "number_in",
    "presences_of",
    "ratio",
    "running_mean",
    "scalars",
    "spending_of",
    "steps_to_target",
    "stretches_of",
]
