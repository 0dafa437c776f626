"""Failure traces: times at which nodes leave and return, generated or read from published files."""

from swift.tools.simulate.traces.generate import evenly_spaced, poisson, weibull
from swift.tools.simulate.traces.read import read_trace
from swift.tools.simulate.traces.trace import Event, NodeChange, Trace

__all__ = [
    "Event",
    "NodeChange",
    "Trace",
    "evenly_spaced",
    "poisson",
    "read_trace",
    "weibull",
]
