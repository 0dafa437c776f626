"""Capacity by rank: the slots of a rank share its rows.

``limits`` decides which tokens are served. ``balanced_flow`` finds the tokens of each slot with which the fullest rank
has the fewest, and ``sources`` the ranks that they come from; ``token_split`` does both by rounds of scaling instead.
``even_shares`` assigns slots anew for exact capacity. ``buffers`` says where rows lie, ``token_rows`` the same where a
token goes to a rank once for all of its choices there, and ``row_exchange`` moves rows between ranks.
"""

from swift.experts.rank_capacity.balanced_flow import Holders, balance, relieve
from swift.experts.rank_capacity.buffers import received_pairs, sent_pairs, slot_groups, slots_of_pairs
from swift.experts.rank_capacity.even_shares import assign_slots, check_exact, exact_slots
from swift.experts.rank_capacity.limits import serve
from swift.experts.rank_capacity.row_exchange import exchange_rows
from swift.experts.rank_capacity.sources import by_source
from swift.experts.rank_capacity.token_rows import (
    TokenRows,
    copy_to_slots,
    repeat_tokens,
    sum_over_slots,
    sum_tokens,
)
from swift.experts.rank_capacity.token_split import Slots

__all__ = [
    "Holders",
    "Slots",
    "TokenRows",
    "assign_slots",
    "balance",
    "by_source",
    "check_exact",
    "copy_to_slots",
    "exact_slots",
    "exchange_rows",
    "received_pairs",
    "relieve",
    "repeat_tokens",
    "sent_pairs",
    "serve",
    "slot_groups",
    "slots_of_pairs",
    "sum_over_slots",
    "sum_tokens",
]
