"""Capacity: which tokens of an expert are served, by which of its slots, and in which rows.

With capacity by ``slot``, every slot has rows of its own. With capacity by ``rank``, the slots of a rank share its
rows: ``balanced_flow`` finds the tokens of each slot with which the fullest rank has the fewest, and ``token_split``
from which ranks they come, or it finds both in rounds of scaling. With ``exact`` capacity, slots are assigned anew and
nothing is dropped. ``rank`` also says where rows lie, ``token_rows`` the same where a token goes to a rank once for all
of its choices there, and ``token_exchange`` moves rows between ranks.
"""
