"""Simulation of failures at cluster scale: strategies run through a failure trace. Plain Python and NumPy.

``engine`` runs one of the ``strategies`` through one of the ``traces``; ``job`` holds sizes and speeds; ``outcome`` is
the result, and ``json_format`` its document.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names
from swift.tools.simulate.strategies.registry import strategies

if TYPE_CHECKING:
    from swift.tools.simulate.engine import simulate
    from swift.tools.simulate.job import Job
    from swift.tools.simulate.json_format import document
    from swift.tools.simulate.outcome import CAUSES, Outcome
    from swift.tools.simulate.periods import Periods
    from swift.tools.simulate.strategies.published import MODELS, Published, published
    from swift.tools.simulate.strategies.registry import ON_REQUEST, STRATEGIES, CannotRun
    from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Strategy, Turn
    from swift.tools.simulate.traces.generate import evenly_spaced, poisson, weibull
    from swift.tools.simulate.traces.read import read_trace
    from swift.tools.simulate.traces.trace import Event, Trace

_MODULES = {
    "swift.tools.simulate.engine": ["simulate"],
    "swift.tools.simulate.job": ["Job"],
    "swift.tools.simulate.json_format": ["document"],
    "swift.tools.simulate.outcome": ["CAUSES", "Outcome"],
    "swift.tools.simulate.periods": ["Periods"],
    "swift.tools.simulate.strategies.published": ["MODELS", "Published", "published"],
    "swift.tools.simulate.strategies.registry": ["CannotRun", "ON_REQUEST", "STRATEGIES"],
    "swift.tools.simulate.strategies.strategy": ["Moment", "Pace", "Pause", "Saves", "Strategy", "Turn"],
    "swift.tools.simulate.traces.generate": ["evenly_spaced", "poisson", "weibull"],
    "swift.tools.simulate.traces.read": ["read_trace"],
    "swift.tools.simulate.traces.trace": ["Event", "Trace"],
}
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
