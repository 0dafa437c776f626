"""Timing of ops whose order on every worker is given.

``graph`` says which op waits for which, and ``timing`` finds the shortest period.
"""

from swift.schedules.sequences.graph import SequencedOp
from swift.schedules.sequences.timing import time_round

__all__ = ["SequencedOp", "time_round"]
