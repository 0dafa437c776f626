"""Parser of the command line, options of several commands, and the line that a terminal shows while JAX is loaded.

Nothing here imports JAX, which takes seconds.
"""

from swift.cli.console.evaluating import add_evaluate
from swift.cli.console.input import add_data
from swift.cli.console.parser import OneLineParser, ShowVersion, path_of, with_negative_values, with_suggestion
from swift.cli.console.planning import add_compile, add_place, add_plan, add_simulate
from swift.cli.console.shared_options import (
    add_config,
    add_deadlines,
    add_hosts,
    add_init_from,
    add_prepare,
    add_progress,
    add_settings,
    add_stopping,
)
from swift.cli.console.startup import Startup
from swift.cli.console.watching import ParentLink, watched

__all__ = [
    "OneLineParser",
    "ParentLink",
    "ShowVersion",
    "Startup",
    "add_compile",
    "add_config",
    "add_data",
    "add_deadlines",
    "add_evaluate",
    "add_hosts",
    "add_init_from",
    "add_place",
    "add_plan",
    "add_prepare",
    "add_progress",
    "add_settings",
    "add_simulate",
    "add_stopping",
    "path_of",
    "watched",
    "with_negative_values",
    "with_suggestion",
]
