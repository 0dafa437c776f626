"""Drawings of a schedule: characters in a terminal, a picture for a paper, a trace for Perfetto.

Take what you need from ``text``, ``picture`` or ``trace``: they import rich, Matplotlib and nothing, respectively.
"""
