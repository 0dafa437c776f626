"""Optimization of input pipelines, and input hosts that produce samples for other machines.

``profile`` measures the operators of a pipeline, and ``optimizer`` chooses a plan from the profile. ``server`` produces
samples for another machine, whose ``client`` requests them. Both sides prove that they have the same key, and compare
versions, data and operators. Only numbers and samples are sent, never code. After the handshake, messages are neither
signed nor encrypted, as between the nodes of a run.
"""
