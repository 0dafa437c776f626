"""A live view of runs, for ``swift watch``: reads what runs write, and never writes or locks anything itself.

``state`` follows the files of a run and condenses them into a snapshot, ``series`` keeps a metric over any number of
iterations in little memory, ``view`` draws snapshots as lines of text, and ``serve`` serves the page of ``swift
report``.
"""
