"""Capacity: which of an expert's tokens are served, by which slots, and in which rows.

With capacity by ``slot``, every slot has rows of its own. With capacity by ``rank``, the slots of a rank share its
rows: ``balanced_flow`` computes how many tokens each slot gets so that the load of the fullest rank is minimal, and
``token_split`` divides these tokens among the source ranks; alternatively, ``token_split`` computes both in rounds of
scaling. With ``exact`` capacity, slots are reassigned in every micro-batch and nothing is dropped. ``rank`` also lays
out the rows; ``token_rows`` does so if a token is sent to a rank only once for all of its choices there.
``token_exchange`` moves rows between ranks.
"""
