"""Failures at cluster scale, simulated: strategies that run through a failure trace. Plain Python and numpy."""

from swift.simulate.document import document
from swift.simulate.engine import simulate
from swift.simulate.generate import evenly_spaced, poisson, weibull
from swift.simulate.job import Job
from swift.simulate.outcome import CAUSES, Outcome, Stretch
from swift.simulate.periods import Periods
from swift.simulate.published import MODELS, Published, published
from swift.simulate.read import read_trace
from swift.simulate.strategies import STRATEGIES, CannotRun, strategies
from swift.simulate.strategy import Moment, Pace, Pause, Saves, Strategy, Turn
from swift.simulate.trace import Change, Event, Trace

__all__ = [
    "CAUSES",
    "MODELS",
    "STRATEGIES",
    "CannotRun",
    "Change",
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
    "Stretch",
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
