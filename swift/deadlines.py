"""Timeouts for the processes of a run."""

from dataclasses import dataclass

from swift.errors import check_count, check_number


@dataclass(frozen=True)
class Deadlines:
    """The supervisor's timeouts, in seconds.

    Attributes:
        start: from the start of a process until it is ready; at the start of a run, until all processes are ready.
        forming: until all members of a generation have left the previous one, and again until all are connected.
        heartbeat: between two heartbeats of a process.
        progress: between two finished iterations, and from connecting until ready to train; must leave time to compile.
        saving: from a save or load request to the checkpoint service until its answer; must leave time for a large
            checkpoint.
        dying: from killing a process until it has exited; after that, the run continues without it, see ``Retire``.
        stopping: from Ctrl-C or SIGTERM until the last iteration is saved; anything not saved by then is lost.
        max_quick_deaths: maximum number of consecutive deaths of a process before it has ever been live; after that,
            the run ends. If a death restarts all processes: maximum number of its deaths before it finishes an
            iteration; after that, the other processes continue without it.
    """

    start: float = 120.0
    forming: float = 30.0
    heartbeat: float = 3.0
    progress: float = 120.0
    saving: float = 120.0
    dying: float = 10.0
    stopping: float = 110.0
    max_quick_deaths: int = 3

    def __post_init__(self) -> None:
        for name in ("start", "forming", "heartbeat", "progress", "saving", "dying", "stopping"):
            check_number(f"Deadlines.{name}", getattr(self, name), above=0)
        check_count("Deadlines.max_quick_deaths", self.max_quick_deaths, least=1)
