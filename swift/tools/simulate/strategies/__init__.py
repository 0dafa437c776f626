"""Strategies that a simulation compares.

Re-routing (Swift, ReCycle), restarts from checkpoints, Oobleck, Varuna, Bamboo.
"""

from swift.tools.simulate.strategies.published import MODELS, Published, published
from swift.tools.simulate.strategies.registry import STRATEGIES, CannotRun, strategies
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Strategy, Turn

__all__ = [
    "MODELS",
    "STRATEGIES",
    "CannotRun",
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
