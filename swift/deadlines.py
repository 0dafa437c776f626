"""How long a run waits for its processes."""

from dataclasses import dataclass

from swift.errors import check_count, check_number


@dataclass(frozen=True)
class Deadlines:
    """How long the supervisor waits for what, in seconds.

    Attributes:
        start: from the start of a process until it is ready; also for the others when a run begins.
        forming: until all members of a generation have left the one before, and until all have met.
        heartbeat: between two signs of life.
        progress: between two finished iterations, and from meeting to being ready; has to leave time to compile.
        saving: from asking the keeper to save or load a checkpoint until it answers; has to leave time for a large one.
        dying: from the killing of a process until it has died; after that the run goes on without it, see ``Retire``.
        stopping: from Ctrl-C or SIGTERM until the last iteration is saved; what is not by then is lost.
        max_quick_deaths: deaths in a row of a process that was never live, after which it is given up.
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
