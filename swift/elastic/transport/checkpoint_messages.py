"""Messages between the supervisor and the checkpoint service."""

from typing import Any, Literal, NamedTuple

from swift.elastic.membership import Process, ShardLayout, Stamp
from swift.elastic.transport.codec import Codec


class SaveCheckpoint(NamedTuple):
    """Write a checkpoint of the parts that processes have kept.

    Attributes:
        stamp: the stamp of the state.
        holders: the processes whose parts these are, one for every stage and rank.
        is_full: save all experts, whatever K is.
        is_elsewhere: where there is room for it, since it cannot be written where it belongs.
    """

    stamp: Stamp
    holders: tuple[Process, ...]
    is_full: bool = False
    is_elsewhere: bool = False


class LoadCheckpoint(NamedTuple):
    """Read a checkpoint, and keep for every process its part.

    Attributes:
        step: the iteration of the checkpoint; None: the newest.
        generation: the generation of the stamp under which the parts are kept.
        processes: the processes of that generation.
    """

    step: int | None
    generation: int
    processes: tuple[Process, ...]


class Reshard(NamedTuple):
    """Reshard a state for the ranks of a generation, and keep for every process its part.

    Attributes:
        stamp: the stamp of the state, as processes have handed it over.
        cut: its layout.
        generation: the generation of the stamp under which the parts are kept.
        processes: the processes of that generation.
    """

    stamp: Stamp
    cut: ShardLayout
    generation: int
    processes: tuple[Process, ...]


class Saved(NamedTuple):
    """A checkpoint is there.

    Attributes:
        step: the last iteration that it contains.
        seconds: the time that the save took.
        path: the name of its directory.
        facts: further fields of the event.
    """

    step: int
    seconds: float
    path: str
    facts: dict[str, Any]


class Kept(NamedTuple):
    """A checkpoint is not where it belongs, but where there was room for it.

    Attributes:
        step: the last iteration that it contains.
        text: a line on the place, and on how to resume from there.
    """

    step: int
    text: str


class Loaded(NamedTuple):
    """The parts of all processes are kept.

    Attributes:
        stamp: the stamp under which they are kept.
        lines: where they came from, for people.
        facts: the same for the events.
    """

    stamp: Stamp
    lines: list[str]
    facts: dict[str, Any]


class Anew(NamedTuple):
    """A state is resharded, and the parts of all processes are kept.

    Attributes:
        stamp: the stamp under which they are kept.
        lines: where the slices of lost ranks came from, for people.
        facts: the same for the events.
    """

    stamp: Stamp
    lines: list[str]
    facts: dict[str, Any]


class Failed(NamedTuple):
    """Nothing came of a command.

    Attributes:
        what: the command.
        step: its iteration; None where the newest checkpoint was asked for and there is none.
        why: the reason, a line.
        generation: the generation that waits for a state; 0: none.
    """

    what: Literal["save", "load", "recut"]
    step: int | None
    why: str
    generation: int = 0


CheckpointCommand = SaveCheckpoint | LoadCheckpoint | Reshard
CheckpointAnswer = Saved | Kept | Loaded | Anew | Failed


CHECKPOINT_COMMANDS = Codec[CheckpointCommand](SaveCheckpoint, LoadCheckpoint, Reshard)
CHECKPOINT_ANSWERS = Codec[CheckpointAnswer](Saved, Kept, Loaded, Anew, Failed)
