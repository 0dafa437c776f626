"""Simulation of training on nodes that fail: re-routing (Swift, ReCycle), restarts, Oobleck and other strategies.

``engine`` simulates a strategy on a failure trace (``traces``), with the sizes and speeds of a ``job``. ``strategies``
defines the interface of strategies, and the ideal, re-routing and adapting ones. ``restarting`` has restarts from
checkpoints. ``published`` has Oobleck, Varuna and Bamboo with their published figures. ``registry`` lists all
strategies by name, and ``json_format`` builds the results as JSON.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names
from swift.simulate.published import published
from swift.simulate.registry import strategies

if TYPE_CHECKING:
    from swift.simulate.engine import CAUSES, Outcome, simulate
    from swift.simulate.job import Job, Periods
    from swift.simulate.json_format import document
    from swift.simulate.published import MODELS, Published
    from swift.simulate.registry import ON_REQUEST, STRATEGIES, CannotRun
    from swift.simulate.strategies import ClusterChange, Decision, IterationTiming, Pause, Saves, Strategy
    from swift.simulate.traces import Event, Trace, evenly_spaced, poisson, read_trace, weibull

_MODULES = {
    "swift.simulate.engine": ["CAUSES", "Outcome", "simulate"],
    "swift.simulate.job": ["Job", "Periods"],
    "swift.simulate.json_format": ["document"],
    "swift.simulate.published": ["MODELS", "Published"],
    "swift.simulate.registry": ["CannotRun", "ON_REQUEST", "STRATEGIES"],
    "swift.simulate.strategies": ["ClusterChange", "IterationTiming", "Pause", "Saves", "Strategy", "Decision"],
    "swift.simulate.traces": ["Event", "Trace", "evenly_spaced", "poisson", "read_trace", "weibull"],
}
__all__ = [
    "CAUSES",
    "MODELS",
    "ON_REQUEST",
    "STRATEGIES",
    "CannotRun",
    "ClusterChange",
    "Decision",
    "Event",
    "IterationTiming",
    "Job",
    "Outcome",
    "Pause",
    "Periods",
    "Published",
    "Saves",
    "Strategy",
    "Trace",
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
