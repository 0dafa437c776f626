"""Strategies that a simulation compares: re-routing (Swift, ReCycle), restarts, Oobleck, Varuna, Bamboo, an ideal.

``strategy`` defines the interface, ``registry`` lists all of them by name, and ``published`` holds published figures.
"""

from swift.tools.simulate.strategies.adapting import Adapting, Gaps
from swift.tools.simulate.strategies.published import MODELS, Published, published
from swift.tools.simulate.strategies.registry import ON_REQUEST, STRATEGIES, CannotRun, strategies
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Strategy, Turn

__all__ = [
    "MODELS",
    "ON_REQUEST",
    "STRATEGIES",
    "Adapting",
    "CannotRun",
    "Gaps",
    "Moment",
    "Pace",
    "Pause",
    "Published",
    "Saves",
    "Strategy",
    "Turn",
    "published",
    "strategies",
]
