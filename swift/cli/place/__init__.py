"""``swift place``: experts placed on ranks by their loads."""
