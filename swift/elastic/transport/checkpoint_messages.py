"""Messages between the supervisor and the checkpoint service."""

from typing import Any, Literal, NamedTuple

from swift.elastic.membership.members import Process, ShardLayout, Stamp
from swift.elastic.transport.codec import Codec
from swift.schedules.plans.holders import OWN_CUT, BlockHolders


class SaveCheckpoint(NamedTuple):
    """Write a checkpoint of the parts that processes have kept.

    Attributes:
        stamp: stamp of the state.
        holders: processes that have kept its parts: of whole workers that together have every block, each rank of them.
        is_full: whether to save all experts, whatever K is.
        is_elsewhere: whether to save it where there is room, as it cannot be written into the run directory.
        cut: workers that hold each block of the parts; False: as in the run.
    """

    stamp: Stamp
    holders: tuple[Process, ...]
    is_full: bool = False
    is_elsewhere: bool = False
    cut: BlockHolders = OWN_CUT


class LoadCheckpoint(NamedTuple):
    """Read a checkpoint, and keep every process's part of it.

    Attributes:
        step: iteration of the checkpoint; None: the newest.
        generation: generation of the stamp under which the parts are kept.
        processes: processes of that generation.
    """

    step: int | None
    generation: int
    processes: tuple[Process, ...]


class Reshard(NamedTuple):
    """Reshard a state for the ranks of a generation, and keep every process's part of it.

    Attributes:
        stamp: stamp of the state that processes have handed over.
        layout: its layout.
        generation: generation of the stamp under which the parts are kept.
        processes: processes of that generation.
    """

    stamp: Stamp
    layout: ShardLayout
    generation: int
    processes: tuple[Process, ...]


class Saved(NamedTuple):
    """A checkpoint has been written.

    Attributes:
        step: last iteration that it contains.
        seconds: duration of the save, in seconds.
        path: name of its directory.
        facts: further fields of the event.
    """

    step: int
    seconds: float
    path: str
    facts: dict[str, Any]


class KeptElsewhere(NamedTuple):
    """A checkpoint has been written outside the run directory.

    Attributes:
        step: last iteration that it contains.
        text: line on its location, and on how to resume from it.
    """

    step: int
    text: str


class StateRestored(NamedTuple):
    """A state has been loaded or resharded, and the parts of all processes are kept.

    Attributes:
        stamp: stamp under which they are kept.
        lines: where the state, or the slices of lost ranks, came from, for the terminal.
        facts: the same for the events.
        is_resharded: whether it was resharded rather than loaded from a checkpoint.
        is_origin: whether it is the one that the run begins with, with the weights of another run.
    """

    stamp: Stamp
    lines: list[str]
    facts: dict[str, Any]
    is_resharded: bool = False
    is_origin: bool = False


class CommandFailed(NamedTuple):
    """A command has failed.

    Attributes:
        what: the command.
        step: its iteration; None if the newest checkpoint was requested and there is none.
        why: reason, in a line.
        generation: generation that waits for a state; 0: none.
    """

    what: Literal["save", "load", "reshard"]
    step: int | None
    why: str
    generation: int = 0


CheckpointCommand = SaveCheckpoint | LoadCheckpoint | Reshard
CheckpointAnswer = Saved | KeptElsewhere | StateRestored | CommandFailed


CHECKPOINT_COMMANDS = Codec[CheckpointCommand](SaveCheckpoint, LoadCheckpoint, Reshard)
CHECKPOINT_ANSWERS = Codec[CheckpointAnswer](Saved, KeptElsewhere, StateRestored, CommandFailed)
