"""``swift place``: experts placed on ranks by their loads."""

from swift.cli.place.command import place

__all__ = ["place"]
