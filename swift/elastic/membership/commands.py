"""Commands of the membership, which the supervisor carries out."""

from typing import NamedTuple

from swift.elastic.membership.processes import Member, Process, ShardLayout, Stamp


class Form(NamedTuple):
    """To all members: leave the generation that you are in for this one, and answer ``Departed``.

    Attributes:
        number: the generation, larger than any before.
        members: its members, by process.
        after: run until this iteration is done, unless you are beyond it; None: abort at once.
    """

    number: int
    members: tuple[Member, ...]
    after: int | None = None


class Enter(NamedTuple):
    """To all members, once each has left: form the generation now, so that nobody waits long; answer ``Formed``."""

    number: int
    members: tuple[Member, ...]


class Go(NamedTuple):
    """All members have formed the generation: it is live. The supervisor answers with ``Stored``.

    Attributes:
        number: the generation.
        stamp: the state to resume from, all others are to be forgotten; None: members hold no common state.
        holders: the members that have that state; any other copies from one of its stage.
        cut: the layout of that state, where it has to be resharded before the members can use it; else None.
        is_whole: whether all slices of the state exist; else some have to come from older states.
    """

    number: int
    stamp: Stamp | None
    holders: tuple[Member, ...] = ()
    cut: ShardLayout | None = None
    is_whole: bool = True


class RestoreState(NamedTuple):
    """Load the newest checkpoint for the members of a generation; report ``Restored``."""

    number: int


class ReshardState(NamedTuple):
    """Divide a state anew for the members of a generation; report ``Restored``.

    Attributes:
        number: the generation.
        stamp: the state.
        cut: its present layout.
    """

    number: int
    stamp: Stamp
    cut: ShardLayout


class StartGeneration(NamedTuple):
    """To all members: run.

    Attributes:
        go: the generation, its state and who holds it.
        written: the last iteration whose record is written.
        is_restored: the state is that of a checkpoint, or resharded, and lies among every member's snapshots.
    """

    go: Go
    written: int = 0
    is_restored: bool = False


class Kill(NamedTuple):
    """Kill a process if it still exists; ``Died`` follows, or in the end ``Retire``."""

    member: Member
    why: str


class Retire(NamedTuple):
    """Count a killed process that has not died as gone; never start it again, nor anything on its node."""

    member: Member
    why: str


class StartProcess(NamedTuple):
    """Start a dead process again; report ``Started``."""

    process: Process


class RestartAll(NamedTuple):
    """Kill all processes and start them again: nobody can be blamed."""

    why: str


class StageLost(NamedTuple):
    """No process is left that could serve these stages; the next generation waits until there is one."""

    stages: tuple[int, ...]


class GiveUp(NamedTuple):
    """A process dies again and again before it is of any use."""

    process: Process
    why: str


class StopRun(NamedTuple):
    """The run cannot continue.

    Attributes:
        why: the reason.
        remedy: what the user can do; None: resume from the newest checkpoint.
    """

    why: str
    remedy: str | None = None


Command = (
    (Form | Enter | Go | RestoreState | ReshardState | StartGeneration)
    | (Kill | Retire | StartProcess | RestartAll)
    | (StageLost | GiveUp | StopRun)
)
Commands = tuple[Command, ...]
