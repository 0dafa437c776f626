"""Status of a process, as the supervisor knows it."""

from dataclasses import dataclass
from enum import StrEnum

from swift.elastic.membership.members import Member


class ProcessState(StrEnum):
    """Phase in the life of a process, as far as the supervisor knows."""

    DEAD = "dead"
    STARTING = "starting"
    WAITING = "waiting"
    FORMING = "forming"
    LIVE = "live"
    RETIRED = "retired"


@dataclass(frozen=True)
class ProcessStatus:
    """Status of a process.

    Attributes:
        member: its newest incarnation; -1 if it was never started.
        state: phase of this incarnation.
        seen: when it was started or last sent a message, in seconds.
        is_dying: whether it is being killed.
        killed: when it was killed, in seconds.
        is_blameless: whether it is killed together with all others, through no fault of its own.
        has_injected_fault: whether a fault was injected into this incarnation.
        last_live: newest generation in which it was live; 0: none.
        deaths: number of its deaths that count towards the limit of restarts.
        quick_deaths: number of consecutive incarnations, up to the last that died, that were never live.
        entered: newest iteration that it has begun in the newest live generation; 0: none yet.
        finished: newest iteration that it has finished there.
    """

    member: Member
    state: ProcessState = ProcessState.DEAD
    seen: float = 0.0
    is_dying: bool = False
    killed: float = 0.0
    is_blameless: bool = False
    has_injected_fault: bool = False
    last_live: int = 0
    deaths: int = 0
    quick_deaths: int = 0
    entered: int = 0
    finished: int = 0

    @property
    def is_present(self) -> bool:
        """Returns whether it can be a member of the next generation."""
        return self.is_alive and self.state is not ProcessState.STARTING and not self.is_dying

    @property
    def is_alive(self) -> bool:
        """Returns whether it may still send messages: it is neither dead nor retired."""
        return self.state not in (ProcessState.DEAD, ProcessState.RETIRED)
