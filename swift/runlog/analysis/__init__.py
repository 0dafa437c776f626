"""Analysis of a run's record: history on one clock, incidents, measures, presence of workers, use of time."""

from swift.runlog.analysis.history import History, Stretch, history_of, names_in, number_in, stretches_of
from swift.runlog.analysis.incidents import Incident, incidents_of
from swift.runlog.analysis.measures import measure, ratio, running_mean, scalars, steps_to_target
from swift.runlog.analysis.time_breakdown import CAUSES, time_by_cause
from swift.runlog.analysis.worker_presence import Presence, presences_of

__all__ = [
    "CAUSES",
    "History",
    "Incident",
    "Presence",
    "Stretch",
    "history_of",
    "incidents_of",
    "measure",
    "names_in",
    "number_in",
    "presences_of",
    "ratio",
    "running_mean",
    "scalars",
    "steps_to_target",
    "stretches_of",
    "time_by_cause",
]
