"""Events that the supervisor reports to the membership: what it sees, and what processes say.

Every event has its time, in seconds of any clock that never goes back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swift.elastic.membership.processes import Member, Process, Stamp


class Started(NamedTuple):
    """The supervisor has started a process whose last life has ended."""

    member: Member
    time: float


class Ready(NamedTuple):
    """A process waits for the next generation. ``number``: the one in which it could not continue, or 0."""

    member: Member
    time: float
    number: int = 0


class Died(NamedTuple):
    """A process is gone for certain: its exit was collected, or it can never be heard again.

    Attributes:
        member: the process.
        time: when the death was detected.
        why: the cause, in a few words.
        is_own: whether the process itself failed, rather than the node that it was on.
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


class Formed(NamedTuple):
    """A member is ready to run.

    Attributes:
        member: the sender.
        number: the generation.
        held: the states of which it has its part; empty if it has none.
        time: when this was received.
        found: slices that it knows to be somewhere else than with their process: whose, and of which states.
    """

    member: Member
    number: int
    held: frozenset[Stamp]
    time: float
    found: frozenset[tuple[Process, Stamp]] = frozenset()


class Beat(NamedTuple):
    """A heartbeat.

    Attributes:
        member: the sender.
        number: the generation that it runs; 0: none.
        entered: the newest iteration, from 1, that it has begun in this generation; 0: none yet.
        finished: the newest iteration that it has finished; 0: none yet.
        time: when this was received.
    """

    member: Member
    number: int
    entered: int
    finished: int
    time: float


class Took(NamedTuple):
    """The time that a member took for a part of the transition between two generations.

    ``link`` says that it has met all the others: from then on it may have to compile.

    Attributes:
        member: the sender.
        number: the generation to be formed.
        part: one of ``PARTS``.
        seconds: the duration.
        time: when this was received.
    """

    member: Member
    number: int
    part: str
    seconds: float
    time: float


PARTS = ("leave", "link", "program", "state", "first_step")
"""The parts of a transition, from ``Form`` to the end of a member's first iteration: it keeps its state on the host and
drops its devices, connects new ones with the others, loads or compiles its program, has its state on the devices again,
and runs one iteration."""


class Done(NamedTuple):
    """A member has run all iterations that it is to run in this generation."""

    member: Member
    number: int
    time: float


class Harmed(NamedTuple):
    """Fault injection has harmed a process: this death does not count towards the limit of restarts."""

    member: Member
    time: float


class Woke(NamedTuple):
    """The supervisor was suspended and has not heard yet what was sent meanwhile."""

    time: float


class Stored(NamedTuple):
    """The checkpoints that exist as a generation goes live.

    Attributes:
        time: when they were listed.
        newest: the iteration of the newest checkpoint; None: there is none.
        is_full: whether that is sound and holds every expert's state of that iteration.
        is_busy: whether a save or a load is still under way.
        written: the last iteration whose record is written.
    """

    time: float
    newest: int | None = None
    is_full: bool = False
    is_busy: bool = False
    written: int = 0


class Restored(NamedTuple):
    """The state for a generation, read from a checkpoint or resharded, lies among every member's snapshots.

    Attributes:
        stamp: the state; its generation is the one that waits for it.
        time: when this was received.
        written: the last iteration whose record is written.
    """

    stamp: Stamp
    time: float
    written: int = 0


class RestoreFailed(NamedTuple):
    """A state could be neither read nor resharded.

    Attributes:
        number: the generation that waits for it.
        time: when this was received.
        why: what is lost.
        remedy: what the user can do; None: resume from the newest checkpoint.
    """

    number: int
    time: float
    why: str
    remedy: str | None = None


@dataclass(frozen=True)
class MayRestart:
    """Dead processes may be started again now.

    Attributes:
        time: when.
        away: for how long the node of a process has been away, in seconds, where it is.
        held_down: the processes that fault injection keeps down for now.
    """

    time: float
    away: Mapping[Process, float] = field(default_factory=dict)
    held_down: frozenset[Process] = frozenset()


class Tick(NamedTuple):
    """Everything seen so far has been reported: it is time to decide."""

    time: float


Message = Ready | Departed | Formed | Beat | Took | Done
"""Events that processes send themselves; the others the supervisor observes."""
Event = Started | Died | Harmed | Message | Woke | Stored | Restored | RestoreFailed | MayRestart | Tick
