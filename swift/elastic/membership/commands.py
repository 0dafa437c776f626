"""Commands of the membership, which the supervisor carries out. ``number`` is the number of a generation."""

from typing import NamedTuple

from swift.elastic.membership.members import Member, Process, ShardLayout, Stamp
from swift.schedules.plans.holders import OWN_CUT, BlockHolders


class Form(NamedTuple):
    """Command to all members: leave the current generation and join this one; each answers ``Departed``.

    Attributes:
        number: number of the generation, larger than any before.
        members: its members, sorted by process.
        after: iteration to finish before leaving; None: abort the current iteration at once.
        cut: workers that hold each block while it runs; False: as in the run.
    """

    number: int
    members: tuple[Member, ...]
    after: int | None = None
    cut: BlockHolders = OWN_CUT

    @property
    def stays_connected(self) -> bool:
        """Returns whether the members keep the connections and devices of the live generation, which has the same."""
        return bool(self.cut)


class LoadAhead(NamedTuple):
    """Command to all members of a live generation: load the programs of the next one as they run; answer ``Loaded``.

    Attributes:
        number: number of the live generation.
        members: its members, which will be those of the next one.
        cut: workers that will hold each block.
    """

    number: int
    members: tuple[Member, ...]
    cut: BlockHolders


class Enter(NamedTuple):
    """Command to all members, once every one has left: connect to each other; each answers ``Formed``."""

    number: int
    members: tuple[Member, ...]


class GoLive(NamedTuple):
    """Make a generation live that all members have formed; the supervisor reports ``CheckpointsListed``.

    Attributes:
        stamp: state to resume from; None: the members have no common state.
        holders: members that have this state; the others copy it from a peer.
        layout: layout of this state if it has to be resharded before the members can use it; None otherwise.
        is_whole: whether all slices of the state exist; otherwise some have to come from older states.
        cut: workers that hold each block of this state; False: as in the run.
    """

    number: int
    stamp: Stamp | None
    holders: tuple[Member, ...] = ()
    layout: ShardLayout | None = None
    is_whole: bool = True
    cut: BlockHolders = OWN_CUT


class RestoreState(NamedTuple):
    """Load the newest checkpoint for the members of a generation; report ``Restored``."""

    number: int


class ReshardState(NamedTuple):
    """Reshard a state for the members of a generation; report ``Restored``.

    Attributes:
        stamp: state to reshard.
        layout: its present layout.
    """

    number: int
    stamp: Stamp
    layout: ShardLayout


class StartGeneration(NamedTuple):
    """Command to all members: run.

    Attributes:
        go: command that made the generation live: its state, and which members have it.
        written: last iteration whose record is written.
        is_restored: whether the state was loaded or resharded, and is among every member's snapshots.
    """

    go: GoLive
    written: int = 0
    is_restored: bool = False


class Kill(NamedTuple):
    """Kill a process if it still exists; ``Died`` follows, or eventually ``Retire``."""

    member: Member
    why: str


class Retire(NamedTuple):
    """Treat a killed process that does not die as dead; never restart it, nor start anything else on its node."""

    member: Member
    why: str


class StartProcess(NamedTuple):
    """Restart a dead process; report ``Started``."""

    process: Process


class RestartAll(NamedTuple):
    """Kill and restart all processes: the one at fault cannot be identified."""

    why: str


class StageLost(NamedTuple):
    """Report that no process is left to serve these stages, or layers of them; the next generation waits for one."""

    stages: tuple[int, ...]


class LeaveOut(NamedTuple):
    """Report that a process is restarted no more: the others continue without it."""

    process: Process
    why: str


class GiveUp(NamedTuple):
    """Stop the run: a process dies repeatedly at its start, and the others cannot continue without it."""

    process: Process
    why: str


class StopRun(NamedTuple):
    """Stop the run: it cannot continue.

    Attributes:
        why: reason.
        remedy: what the user can do; None: resume from the newest checkpoint.
    """

    why: str
    remedy: str | None = None


Command = (
    (Form | LoadAhead | Enter | GoLive | RestoreState | ReshardState | StartGeneration)
    | (Kill | Retire | StartProcess | RestartAll)
    | (StageLost | LeaveOut | GiveUp | StopRun)
)
Commands = tuple[Command, ...]
