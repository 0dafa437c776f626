"""Events of a run: observations of the supervisor, and messages of its processes.

``member`` is the process that an event is about, or the sender of a message; ``number`` is the number of a generation;
``time`` is when the event was observed or received, in seconds of any monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swift.elastic.membership.members import Member, Process, Stamp
from swift.schedules.plans.holders import BlockHolders
from swift.topology import Worker


class Started(NamedTuple):
    """A process has been started, for the first time or after its death."""

    member: Member
    time: float


class Ready(NamedTuple):
    """A process waits for the next generation. ``number``: the one that it could not continue, or 0."""

    member: Member
    time: float
    number: int = 0


class Died(NamedTuple):
    """A process is known to be dead: its exit status was collected, or it can never be reached again.

    Attributes:
        why: cause, in a few words.
        is_own: whether the process itself failed, rather than the node that it ran on.
    """

    member: Member
    time: float
    why: str
    is_own: bool = True


class Departed(NamedTuple):
    """A member has left the generation before ``number``, and has kept its part of the state."""

    member: Member
    number: int
    time: float


class Formed(NamedTuple):
    """A member is connected to the others and ready to run.

    Attributes:
        held: states of which it has its part; empty if none.
        found: further slices whose location it knows: (owner, state).
    """

    member: Member
    number: int
    held: frozenset[Stamp]
    time: float
    found: frozenset[tuple[Process, Stamp]] = frozenset()


class Heartbeat(NamedTuple):
    """A heartbeat of a process, with its progress.

    Attributes:
        number: generation that it runs; 0: none.
        entered: newest iteration, from 1, that it has begun in this generation; 0: none yet.
        finished: newest iteration that it has finished; 0: none yet.
    """

    member: Member
    number: int
    entered: int
    finished: int
    time: float


class PhaseTimed(NamedTuple):
    """The time that a member took for one phase of the transition between two generations.

    Phase ``link`` also means that it is connected to all the others: from then on it may have to compile.

    Attributes:
        number: generation that is being formed.
        phase: one of ``PHASES``.
        seconds: duration, in seconds.
    """

    member: Member
    number: int
    phase: str
    seconds: float
    time: float


PHASES = ("leave", "link", "program", "state", "first_step")
"""Phases of a transition, from ``Form`` to the end of a member's first iteration: keeping its state on the host and
dropping its devices, connecting to the others, loading or compiling the program, restoring the state on the devices,
and running one iteration."""


class CutRefused(NamedTuple):
    """A member cannot take part in a move of blocks.

    Attributes:
        number: generation with these blocks, which it cannot form, so that it waits for another; or the one that it
            runs, and goes on to run, as it was to load the programs ahead.
        why: reason, in a few words.
    """

    member: Member
    number: int
    why: str
    time: float


class Loaded(NamedTuple):
    """A member has loaded the programs that were to be loaded ahead; or cannot, and will as it forms the generation.

    Attributes:
        number: generation that it runs meanwhile.
    """

    member: Member
    number: int
    time: float


class Done(NamedTuple):
    """A member has run all its iterations of this generation."""

    member: Member
    number: int
    time: float


class FaultInjected(NamedTuple):
    """A fault was injected into a process: its death does not count towards the limit of restarts."""

    member: Member
    time: float


class Woke(NamedTuple):
    """The supervisor was suspended, and has not yet read the messages sent meanwhile."""

    time: float


class CheckpointsListed(NamedTuple):
    """The checkpoints that exist when a generation goes live.

    Attributes:
        newest: iteration of the newest checkpoint; None: there is none.
        is_full: whether it is sound and holds the state of every expert after that iteration.
        is_busy: whether a save or a load is still in progress.
        written: last iteration whose record is written.
    """

    time: float
    newest: int | None = None
    is_full: bool = False
    is_busy: bool = False
    written: int = 0


class Restored(NamedTuple):
    """The state for a generation, loaded from a checkpoint or resharded, is among every member's snapshots.

    Attributes:
        stamp: stamp of the state, with the generation that waits for it.
        written: last iteration whose record is written.
    """

    stamp: Stamp
    time: float
    written: int = 0


class RestoreFailed(NamedTuple):
    """A state could be neither loaded nor resharded.

    Attributes:
        number: generation that waits for it.
        why: what is lost.
        remedy: what the user can do; None: resume from the newest checkpoint.
    """

    number: int
    time: float
    why: str
    remedy: str | None = None


class CutFound(NamedTuple):
    """The survivors of some failures would be faster with other blocks, and the programs for that are prepared.

    Attributes:
        failed: workers that are down.
        cut: workers that hold each block.
        gain: share of the planned time of a re-routed iteration that it saves.
        most_bytes: bytes of state that the worker that gets the most of them has to copy.
    """

    time: float
    failed: frozenset[Worker]
    cut: BlockHolders
    gain: float
    most_bytes: float


@dataclass(frozen=True)
class MayRestart:
    """Dead processes may be restarted now.

    Attributes:
        away: seconds since the node of a process was lost, by process, for lost nodes only.
        held_down: processes that fault injection keeps down for now.
    """

    time: float
    away: Mapping[Process, float] = field(default_factory=dict)
    held_down: frozenset[Process] = frozenset()


class StopRequested(NamedTuple):
    """The run is to stop after an iteration that its members finish: nobody else is admitted, and no blocks move."""

    time: float


class Tick(NamedTuple):
    """Everything observed so far has been reported: decide now."""

    time: float


Message = Ready | Departed | Formed | Heartbeat | PhaseTimed | CutRefused | Loaded | Done
"""Events that processes send; the supervisor observes the others."""
Event = (Started | Died | FaultInjected | Message | Woke | Tick) | (
    CheckpointsListed | Restored | RestoreFailed | CutFound | MayRestart | StopRequested
)
