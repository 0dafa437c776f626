"""Sections of a report and their pictures: curves, timelines, plans, checkpoint coverage, simulations, ranks.

Each function ``*_section(run, history, prefix)`` makes the section on one run, with ``history_of(run)`` and a prefix
for the names of its pictures. It raises SettingError if the record is damaged.
"""
