"""Reports on an elastic run: events, recovery times and goodput.

``journal`` turns events into log entries and times recoveries, ``goodput`` accounts for the time of a run by cause, and
``reporter`` writes events and metrics to the run directory and to the terminal.
"""
