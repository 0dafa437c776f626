"""Deadlines of the command line, such as ``--deadline stopping=300``."""

from collections.abc import Sequence
from dataclasses import replace

from swift.deadlines import Deadlines
from swift.errors import SettingError

OF_PROCESSES = ("start", "forming", "heartbeat", "progress", "saving", "dying", "stopping")
"""Deadlines of a run of real processes."""
OF_ONE = ("stopping",)
"""Deadlines of a run in one process."""


def deadlines_of(texts: Sequence[str], names: Sequence[str], defaults: Deadlines | None = None) -> Deadlines:
    """Returns the deadlines that a command line sets, and for the others these defaults, or those of ``Deadlines``.

    >>> deadlines_of(["heartbeat=2"], OF_PROCESSES).heartbeat
    2.0
    """
    limits = {}
    for text in texts:
        name, _, seconds = text.partition("=")
        try:
            limits[name] = float(seconds)
        except ValueError:
            name = ""
        if name not in names:
            raise SettingError("--deadline", text, f"must be NAME=SECONDS, with one of {', '.join(names)}")
    return replace(defaults or Deadlines(), **limits)  # type: ignore[arg-type]
