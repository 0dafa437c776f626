"""Capacity: which of an expert's tokens are served, by which slots, and in which rows.

With capacity by ``slot``, every slot has rows of its own. With capacity by ``rank``, the slots of a rank share its
rows: ``balanced_flow`` computes the tokens of each slot that minimize the load of the fullest rank, and ``token_split``
divides them among the source ranks, or computes both in rounds of scaling. With ``exact`` capacity, slots are
reassigned in every micro-batch and nothing is dropped. ``rank`` also lays out the rows; ``token_rows`` does so if a
token goes to a rank once for all of its choices there. ``token_exchange`` moves rows between ranks.
"""
