"""Compilation of a run's step for a pod that is not present: memory, exchanged bytes and predicted time.

``compile`` compiles one configuration and collects its facts; ``pods`` describes the hardware; ``traffic`` counts the
bytes that a program exchanges, and ``costs`` predicts its time. ``json_format`` is the report.
"""
