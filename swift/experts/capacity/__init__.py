"""Capacity by rank: the slots of a rank share its rows.

``rank`` decides which tokens are served. ``balanced_flow`` finds the tokens of each slot with which the fullest rank
has the fewest, and ``token_split`` the ranks that they come from; ``token_split`` does both by rounds of scaling
instead. ``exact`` assigns slots anew for exact capacity. ``rank`` says where rows lie, ``token_rows`` the same where a
token goes to a rank once for all of its choices there, and ``row_exchange`` moves rows between ranks.
"""
