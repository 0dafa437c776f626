"""Capacity by rank.

The slots of a rank share one buffer. Which tokens are served, how they are split over the replicas of an expert in
whole numbers, and where their rows lie.
"""

from swift.experts.rank_capacity.buffers import gather_by_slot, rows_in_buffers
from swift.experts.rank_capacity.limits import serve
from swift.experts.rank_capacity.token_split import Slots

__all__ = [
    "Slots",
    "gather_by_slot",
    "rows_in_buffers",
    "serve",
]
