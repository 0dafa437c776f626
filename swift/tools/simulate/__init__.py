"""Simulation of failures at cluster scale: strategies run through a failure trace. Plain Python and NumPy.

``engine`` runs one of the ``strategies`` through one of the ``traces``; ``job`` holds sizes and speeds; ``outcome`` is
the result, and ``json_format`` its document.
"""

from swift.tools.simulate.engine import simulate
from swift.tools.simulate.job import Job
from swift.tools.simulate.json_format import document
from swift.tools.simulate.outcome import CAUSES, Outcome
from swift.tools.simulate.periods import Periods
from swift.tools.simulate.strategies import (
    MODELS,
    ON_REQUEST,
    STRATEGIES,
    CannotRun,
    Moment,
    Pace,
    Pause,
    Published,
    Saves,
    Strategy,
    Turn,
    published,
    strategies,
)
from swift.tools.simulate.traces import Event, Trace, evenly_spaced, poisson, read_trace, weibull

__all__ = [
    "CAUSES",
    "MODELS",
    "ON_REQUEST",
    "STRATEGIES",
    "CannotRun",
    "Event",
    "Job",
    "Moment",
    "Outcome",
    "Pace",
    "Pause",
    "Periods",
    "Published",
    "Saves",
    "Strategy",
    "Trace",
    "Turn",
    "document",
    "evenly_spaced",
    "poisson",
    "published",
    "read_trace",
    "simulate",
    "strategies",
    "weibull",
]
