"""Drawings of a schedule: characters in a terminal, a picture for a paper, a trace for Perfetto.

``picture`` is not imported here, since it loads Matplotlib.
"""
