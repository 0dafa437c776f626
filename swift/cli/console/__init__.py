"""Parser of the command line, and the line that a terminal shows while JAX is loaded.

Nothing here imports JAX, which takes seconds.
"""

from swift.cli.console.parser import OneLineParser, ShowVersion, path_of, with_negative_values, with_suggestion
from swift.cli.console.startup import Startup

__all__ = ["OneLineParser", "ShowVersion", "Startup", "path_of", "with_negative_values", "with_suggestion"]
