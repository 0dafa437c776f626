"""Capacity by rank: the slots of a rank share its rows.

``limits`` decides which tokens are served, ``token_split`` how they are split over the replicas of an expert in whole
numbers, and ``buffers`` where their rows lie.
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
