"""Limits of what a user may ask for, which several packages check; some of them do without JAX."""

MAX_TOKENS = 1_000_000
"""Tokens that a user can have a text continued by at most."""
