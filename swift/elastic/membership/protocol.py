"""Generations of a run of processes: who is in one, what the supervisor hears and says, and where one goes on.

No JAX here, and no clock: every event has its time, in seconds of any clock that never goes back.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from swift.topology import Topology, Worker


class Process(NamedTuple):
    """A place for a process: a whole worker, or one of its expert ranks where each has a process of its own.

    Attributes:
        worker: (pipeline, stage).
        rank: the expert rank, 0 where the process has all of them.
    """

    worker: Worker
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker[0]}:{self.worker[1]}" + (f" rank {self.rank}" if self.rank else "")


class Member(NamedTuple):
    """One life of a process; ``incarnation`` grows with every restart."""

    process: Process
    incarnation: int


def processes_of(topology: Topology, *, by_rank: bool = False) -> tuple[Process, ...]:
    """All processes of a run, one for each worker or one for each expert rank.

    >>> [str(process) for process in processes_of(Topology(1, 2, 2), by_rank=True)]
    ['0:0', '0:0 rank 1', '0:1', '0:1 rank 1']
    """
    ranks = range(topology.num_expert_ranks if by_rank else 1)
    return tuple(Process(worker, rank) for worker in topology.workers for rank in ranks)


class Started(NamedTuple):
    """The supervisor has started a process whose last life has ended."""

    member: Member
    time: float


class Ready(NamedTuple):
    """A process waits for the next generation. ``number``: the one that it could not go on with, or 0."""

    member: Member
    time: float
    number: int = 0


class Died(NamedTuple):
    """A process is gone for certain: it has been waited for, or can never be heard again.

    Attributes:
        member: that has died.
        time: when it was found out.
        why: in a few words.
        is_own: whether that tells something of the process, and not of where it was.
    """

    member: Member
    time: float
    why: str
    is_own: bool = True


class Departed(NamedTuple):
    """A member has left the generation before ``number``, and what it has of its state is kept."""

    member: Member
    number: int
    time: float


class Stamp(NamedTuple):
    """Which state: states of the same stage with the same stamp are the same, bit for bit.

    After a failure an iteration may be run again by other members, whose sums have another order: then it is another
    state. A newer generation goes on from what the one before left behind, so stamps are ordered as states came to be.

    Attributes:
        generation: that computed or restored it.
        step: after this iteration.
    """

    generation: int
    step: int


class ShardLayout(NamedTuple):
    """How a state is cut into the slices of ranks, where the ranks of a run may become fewer and more.

    Attributes:
        processes: whose slices they are, in the order of their ranks.
        generations: those that went on with this cut, one after the other; nothing of the state was lost between them.
    """

    processes: tuple[Process, ...]
    generations: tuple[int, ...]


class Formed(NamedTuple):
    """A member is ready to go.

    Attributes:
        member: who says so.
        number: of the generation.
        held: the states of which it has its part; nothing if it has none.
        time: when it was heard.
        found: whose slices of which states it knows to be somewhere else than among what processes hold themselves.
    """

    member: Member
    number: int
    held: frozenset[Stamp]
    time: float
    found: frozenset[tuple[Process, Stamp]] = frozenset()


class Beat(NamedTuple):
    """A sign of life.

    Attributes:
        member: who beats.
        number: of the generation that it runs; 0: none.
        entered: the newest iteration, from 1, that it has begun in this generation; 0: none yet.
        finished: the newest that it has ended; 0: none yet.
        time: when it was heard.
    """

    member: Member
    number: int
    entered: int
    finished: int
    time: float


class Took(NamedTuple):
    """How long a member took for a part of what lies between two generations.

    ``link`` tells that it has met all the others: from then on it may have to compile.

    Attributes:
        member: who says so.
        number: of the generation that it is to form.
        part: of ``PARTS``.
        seconds: that it took.
        time: when it was heard.
    """

    member: Member
    number: int
    part: str
    seconds: float
    time: float


PARTS = ("leave", "link", "program", "state", "first_step")
"""What a member does from ``Form`` to the end of its first iteration: it keeps its state on the host and drops its
devices, makes new ones with the others, loads or compiles its program, and has its state on the devices again."""


class Tick(NamedTuple):
    """All that has been seen so far has been told: it is time to decide."""

    time: float


Message = Ready | Departed | Formed | Beat | Took
"""What processes say themselves; the rest the supervisor sees."""
Event = Started | Died | Message | Tick


class Form(NamedTuple):
    """To all members: leave the generation that you are in for this one, and answer ``Departed``.

    Attributes:
        number: of the generation, larger than any before.
        members: by process.
        after: run on until this iteration is done, unless you are beyond it; None: abort at once.
    """

    number: int
    members: tuple[Member, ...]
    after: int | None = None


class Enter(NamedTuple):
    """To all members, of which each has left: form the generation now, so that nobody waits long, and answer
    ``Formed``.
    """

    number: int
    members: tuple[Member, ...]


class Go(NamedTuple):
    """To all members, of which each has formed: run.

    Attributes:
        number: of the generation.
        stamp: of the state to go on from, all others are to be forgotten; None: all restore the newest checkpoint.
        holders: the members that have that state; any other copies from one of its stage.
        cut: how it is cut, where the members cannot go on from it before it is cut anew for them; else None.
        is_whole: whether all slices of such a state are there; else some have to come from older ones.
    """

    number: int
    stamp: Stamp | None
    holders: tuple[Member, ...] = ()
    cut: ShardLayout | None = None
    is_whole: bool = True


class Kill(NamedTuple):
    """End a process by force, if it still is there; ``Died`` follows, or in the end ``Retire``."""

    member: Member
    why: str


class Retire(NamedTuple):
    """Count a process as gone that was killed and has not died; never start it again, nor anything where it was."""

    member: Member
    why: str


class RestartAll(NamedTuple):
    """End all processes by force and start them again: nobody can be blamed."""

    why: str


class StageLost(NamedTuple):
    """These stages have no process any more that could serve them; the next generation waits until they have one."""

    stages: tuple[int, ...]


class GiveUp(NamedTuple):
    """A process dies again and again before it is of any use."""

    process: Process
    why: str


Command = Form | Enter | Go | Kill | Retire | RestartAll | StageLost | GiveUp


class State(StrEnum):
    """What a process does, as far as the supervisor knows."""

    DEAD = "dead"
    STARTING = "starting"
    WAITING = "waiting"
    FORMING = "forming"
    LIVE = "live"
    RETIRED = "retired"


@dataclass(frozen=True)
class ProcessStatus:
    """What is known of a process.

    Attributes:
        member: its newest incarnation; -1 if it was never started.
        state: what that does.
        seen: when it was started or last heard of.
        is_dying: whether it is being killed.
        killed: since when.
        spared: whether that is not its own fault.
        lived: the newest generation that it was live in; 0: none.
        quick_deaths: how many incarnations in a row, up to the last that died, were never live.
        entered: the newest iteration that it has begun in the newest live generation; 0: none yet.
        finished: the newest that it has ended there.
    """

    member: Member
    state: State = State.DEAD
    seen: float = 0.0
    is_dying: bool = False
    killed: float = 0.0
    spared: bool = False
    lived: int = 0
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
        since: when something last went on: it began, or went; a member met the others; an iteration was finished, by
            members that run.
        left: the members that have left the one before.
        linked: those that have met all the others.
        held: what those that have formed have answered.
        found: what else they know of.
        is_live: whether it has gone.
    """

    form: Form
    since: float
    left: frozenset[Member] = frozenset()
    linked: frozenset[Member] = frozenset()
    held: Mapping[Member, frozenset[Stamp]] = field(default_factory=dict)
    found: frozenset[tuple[Process, Stamp]] = frozenset()
    is_live: bool = False

    @property
    def missing(self) -> tuple[Member, ...]:
        """The members that have not formed yet."""
        return tuple(member for member in self.form.members if member not in self.held)

    @property
    def staying(self) -> tuple[Member, ...]:
        """The members that have not left the generation before."""
        return tuple(member for member in self.form.members if member not in self.left)


def whole_workers(processes: Collection[Process], present: Collection[Process]) -> frozenset[Worker]:
    """The workers all of whose processes are present."""
    there = frozenset(present)
    return frozenset(worker for worker, _ in processes) - {
        process.worker for process in processes if process not in there
    }


def lost_stages(
    processes: Collection[Process], present: Collection[Process], *, is_elastic: bool = False
) -> tuple[int, ...]:
    """The stages of which no worker is wholly present; in an elastic run, nobody at all.

    >>> lost_stages(processes_of(Topology(2, 2)), [Process((0, 0)), Process((1, 0))])
    (1,)
    >>> lost_stages(processes_of(Topology(1, 1, 2), by_rank=True), [Process((0, 0), rank=1)])
    (0,)
    """
    there = {process.worker for process in present} if is_elastic else whole_workers(processes, present)
    manned = {stage for _, stage in there}
    return tuple(sorted({stage for (_, stage), _ in processes} - manned))


def agreed_stamp(processes: Collection[Process], held_by: Mapping[Process, frozenset[Stamp]]) -> Stamp | None:
    """The newest state that a whole worker of every stage has; None if there is none.

    >>> processes = processes_of(Topology(2, 2))
    >>> held = [{Stamp(1, 5), Stamp(1, 6)}, {Stamp(1, 5)}, {Stamp(1, 4), Stamp(1, 5)}, {Stamp(0, 9)}]
    >>> agreed_stamp(processes, dict(zip(processes, map(frozenset, held))))
    Stamp(generation=1, step=5)
    """
    for stamp in sorted(frozenset().union(*held_by.values()), reverse=True):
        if not lost_stages(processes, [process for process, held in held_by.items() if stamp in held]):
            return stamp
    return None
