"""Planners: from a problem to a schedule."""
