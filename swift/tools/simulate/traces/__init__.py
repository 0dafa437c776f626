"""Failure traces: generated, or read from files."""
