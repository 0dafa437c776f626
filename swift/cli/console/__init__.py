"""Parser of the command line with all its options, and the line that a terminal shows while JAX is loaded.

Nothing here imports JAX, which takes seconds.
"""

from swift.cli.console.command_line import HIDDEN, command_line
from swift.cli.console.guarding import guarded
from swift.cli.console.parser import with_negative_values, with_suggestion
from swift.cli.console.startup import Startup
from swift.cli.console.watching import watched

__all__ = [
    "HIDDEN",
    "Startup",
    "command_line",
    "guarded",
    "watched",
    "with_negative_values",
    "with_suggestion",
]
