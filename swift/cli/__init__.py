"""The command line."""

from swift.cli.main import main

__all__ = ["main"]
