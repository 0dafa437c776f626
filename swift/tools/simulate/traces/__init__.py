"""Failure traces: times at which nodes leave and return, generated or read from published files."""
