"""Strategies that a simulation compares."""
