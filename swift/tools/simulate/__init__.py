"""Failures at cluster scale, simulated: strategies that run through a failure trace. Plain Python and numpy."""

from swift.tools.simulate.engine import simulate
from swift.tools.simulate.job import Job
from swift.tools.simulate.json_format import document
from swift.tools.simulate.outcome import CAUSES, Outcome, PaceInterval
from swift.tools.simulate.periods import Periods
from swift.tools.simulate.strategies.published import MODELS, Published, published
from swift.tools.simulate.strategies.registry import STRATEGIES, CannotRun, strategies
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Strategy, Turn
from swift.tools.simulate.traces.generate import evenly_spaced, poisson, weibull
from swift.tools.simulate.traces.read import read_trace
from swift.tools.simulate.traces.trace import Event, NodeChange, Trace

__all__ = [
    "CAUSES",
    "MODELS",
    "STRATEGIES",
    "CannotRun",
    "Event",
    "Job",
    "Moment",
    "NodeChange",
    "Outcome",
    "Pace",
    "PaceInterval",
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
