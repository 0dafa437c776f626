"""The optimizer: a profile of the first records, the predicted time of a plan, and passes that choose a better one.

Each pass is a file and takes a plan, a profile and what may be used: ``reorder``, ``cache``, ``workers``, ``offload``,
``prefetch``.
"""
