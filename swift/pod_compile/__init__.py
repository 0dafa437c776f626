"""Ahead-of-time compilation for a pod that is not present: memory, traffic and predicted time of a run's step.

``compile`` compiles one configuration and collects its facts. ``pods`` describes the hardware, ``traffic`` counts the
bytes that a program exchanges, and ``costs`` predicts the time of an iteration. ``json_format`` formats the report.
"""
