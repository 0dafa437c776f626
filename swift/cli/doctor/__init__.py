"""``swift doctor``: what this machine, or several together, lack for runs."""

from swift.cli.doctor.command import doctor

__all__ = ["doctor"]
