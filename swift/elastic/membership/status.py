"""Status of each process and of the newest generation, as the supervisor knows them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swift.elastic.membership.commands import Form, GoLive, ReshardState, RestoreState
from swift.elastic.membership.members import Member, Process, Stamp


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
        return self.is_there and self.state is not ProcessState.STARTING and not self.is_dying

    @property
    def is_there(self) -> bool:
        """Returns whether it may send messages, and others may have to wait for it."""
        return self.state not in (ProcessState.DEAD, ProcessState.RETIRED)


@dataclass(frozen=True)
class Generation:
    """The newest generation.

    Attributes:
        form: command that began it.
        since: time of its last progress, in seconds: it began or went live, a member was connected, or running members
            finished an iteration.
        departed: members that have left the generation before.
        linked: members that are connected to all the others.
        held: states that each formed member has.
        found: slices that these members know to be kept elsewhere than by their owner.
        go: command that made it live; None before.
        restoring: command for the state that its members wait for; None: they wait for none.
        base: iteration after which its members run; None before they do.
        done: members that have run all their iterations.
    """

    form: Form
    since: float
    departed: frozenset[Member] = frozenset()
    linked: frozenset[Member] = frozenset()
    held: Mapping[Member, frozenset[Stamp]] = field(default_factory=dict)
    found: frozenset[tuple[Process, Stamp]] = frozenset()
    go: GoLive | None = None
    restoring: RestoreState | ReshardState | None = None
    base: int | None = None
    done: frozenset[Member] = frozenset()

    @property
    def is_live(self) -> bool:
        """Returns whether all members have formed it."""
        return self.go is not None

    @property
    def not_formed(self) -> tuple[Member, ...]:
        """Members that have not formed it yet."""
        return tuple(member for member in self.form.members if member not in self.held)

    @property
    def not_departed(self) -> tuple[Member, ...]:
        """Members that have not left the generation before."""
        return tuple(member for member in self.form.members if member not in self.departed)

    @property
    def is_done(self) -> bool:
        """Returns whether all members have run all their iterations."""
        return self.is_live and set(self.form.members) <= self.done
