"""Compilation of a run's step for a pod that is not present: memory, exchanged bytes and predicted time.

``compiling`` compiles one configuration and collects its facts; ``pods`` and ``devices`` describe the hardware;
``exchanged_bytes``, ``op_work``, ``interconnect`` and ``roofline`` turn programs into bytes and times.
"""
