"""The sections of a report, each with its pictures."""
