"""Drawings: charts of runs, simulations and loads, and schedules as text, as pictures and for Perfetto.

``text`` draws a schedule with characters, ``picture`` for a paper, and ``trace`` for Perfetto. ``charts`` has the
curves and heat maps of runs, and the figures that others draw on; ``loads`` draws simulations and the loads of ranks.
``style`` has the colours of all.
"""
