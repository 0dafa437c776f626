"""Ahead-of-time compilation for an absent pod: memory, traffic and predicted time for a run's step.

``compile`` compiles one configuration and builds its report. ``pods`` describes the hardware, ``traffic`` counts the
bytes that a program exchanges, and ``costs`` predicts the time of an iteration. ``json_format`` formats the report.
"""
