"""Compilation of a run's step for a pod that is not present: memory, exchanged bytes and predicted time.

``compile`` compiles one configuration and collects its facts; ``pods`` and ``pods`` describe the hardware;
``traffic``, ``costs``, ``costs`` and ``costs`` turn programs into bytes and times.
"""
