"""Reports of a run of several processes.

``journal`` makes notes of its events and times its recoveries, ``goodput`` counts its time by cause, and ``reporter``
writes both to the run directory and to the terminal.
"""
