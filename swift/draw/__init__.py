"""Drawings: charts of runs, simulations and loads; schedules as text, as pictures and as Perfetto traces.

``text`` draws a schedule with characters, ``picture`` draws it for a paper, and ``trace`` writes it for Perfetto.
``charts`` draws curves and heat maps of runs, and provides the building blocks for other figures. ``loads`` draws
simulations and rank loads. ``style`` defines the colors for all of them.
"""
