"""Status of each process and of the newest generation, as the supervisor knows them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swift.elastic.membership.commands import Form, Go, ReshardState, RestoreState
from swift.elastic.membership.processes import Member, Process, Stamp


class State(StrEnum):
    """Activity of a process, as far as the supervisor knows."""

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
        state: what that does.
        seen: when it was started or last heard, in seconds.
        is_dying: whether it is being killed.
        killed: when it was killed, in seconds.
        spared: whether it is killed with all others, through no fault of its own.
        is_harmed: whether fault injection has harmed this incarnation.
        lived: the newest generation in which it was live; 0: none.
        deaths: how many of its deaths count towards the limit of restarts.
        quick_deaths: how many incarnations in a row, up to the last that died, were never live.
        entered: the newest iteration that it has begun in the newest live generation; 0: none yet.
        finished: the newest that it has finished there.
    """

    member: Member
    state: State = State.DEAD
    seen: float = 0.0
    is_dying: bool = False
    killed: float = 0.0
    spared: bool = False
    is_harmed: bool = False
    lived: int = 0
    deaths: int = 0
    quick_deaths: int = 0
    entered: int = 0
    finished: int = 0

    @property
    def is_present(self) -> bool:
        """Whether it can be a member of the next generation."""
        return self.is_there and self.state is not State.STARTING and not self.is_dying

    @property
    def is_there(self) -> bool:
        """Whether it may be heard, and has to be waited for."""
        return self.state not in (State.DEAD, State.RETIRED)


@dataclass(frozen=True)
class Generation:
    """The newest generation.

    Attributes:
        form: the command that began it.
        since: when it last advanced, in seconds: it began, or went live; a member met the others; running members
            finished an iteration.
        left: the members that have left the generation before.
        linked: those that have met all the others.
        held: the states that each formed member has.
        found: slices that these members know of elsewhere.
        go: the command with which it went live; None before.
        restoring: the state that its members wait for; None: they wait for none.
        base: the iteration after which its members run; None before they do.
        done: the members that have run all iterations they were to run.
    """

    form: Form
    since: float
    left: frozenset[Member] = frozenset()
    linked: frozenset[Member] = frozenset()
    held: Mapping[Member, frozenset[Stamp]] = field(default_factory=dict)
    found: frozenset[tuple[Process, Stamp]] = frozenset()
    go: Go | None = None
    restoring: RestoreState | ReshardState | None = None
    base: int | None = None
    done: frozenset[Member] = frozenset()

    @property
    def is_live(self) -> bool:
        """Whether all members have formed it."""
        return self.go is not None

    @property
    def missing(self) -> tuple[Member, ...]:
        """The members that have not formed yet."""
        return tuple(member for member in self.form.members if member not in self.held)

    @property
    def staying(self) -> tuple[Member, ...]:
        """The members that have not left the generation before."""
        return tuple(member for member in self.form.members if member not in self.left)

    @property
    def is_done(self) -> bool:
        """Whether all members have run all iterations they were to run."""
        return self.is_live and set(self.form.members) <= self.done
