"""What the supervisor and the keeper of checkpoints say to each other: JSON, a line each."""

from typing import Any, Literal, NamedTuple

from swift.elastic.membership import Process, ShardLayout, Stamp
from swift.elastic.transport.codec import Codec


class SaveCheckpoint(NamedTuple):
    """Write a checkpoint of the parts that processes have kept.

    Attributes:
        stamp: of the state.
        holders: whose parts, one process for every stage and rank.
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
        step: of the checkpoint; None: the newest.
        generation: of the stamp under which the parts are kept.
        processes: of that generation.
    """

    step: int | None
    generation: int
    processes: tuple[Process, ...]


class Reshard(NamedTuple):
    """Cut a state anew for the ranks of a generation, and keep for every process its part.

    Attributes:
        stamp: of the state, as processes have handed it over.
        cut: how it is cut.
        generation: of the stamp under which the parts are kept.
        processes: of that generation.
    """

    stamp: Stamp
    cut: ShardLayout
    generation: int
    processes: tuple[Process, ...]


class Saved(NamedTuple):
    """A checkpoint is there.

    Attributes:
        step: after this iteration.
        seconds: that it took.
        path: the name of its directory.
        facts: what else the events say of it.
    """

    step: int
    seconds: float
    path: str
    facts: dict[str, Any]


class Kept(NamedTuple):
    """A checkpoint is not where it belongs, but where there was room for it.

    Attributes:
        step: after this iteration.
        text: a line on the place, and on how to resume from there.
    """

    step: int
    text: str


class Loaded(NamedTuple):
    """The parts of all processes are kept.

    Attributes:
        stamp: under which.
        lines: where they came from, for people.
        facts: the same for the events.
    """

    stamp: Stamp
    lines: list[str]
    facts: dict[str, Any]


class Anew(NamedTuple):
    """A state is cut anew, and the parts of all processes are kept.

    Attributes:
        stamp: under which.
        lines: where the slices of lost ranks came from, for people.
        facts: the same for the events.
    """

    stamp: Stamp
    lines: list[str]
    facts: dict[str, Any]


class Failed(NamedTuple):
    """Nothing came of a command.

    Attributes:
        what: of which.
        step: its iteration; None where the newest checkpoint was asked for and there is none.
        why: a line.
        generation: for which a state was wanted; 0: for none.
    """

    what: Literal["save", "load", "recut"]
    step: int | None
    why: str
    generation: int = 0


CheckpointCommand = SaveCheckpoint | LoadCheckpoint | Reshard
CheckpointAnswer = Saved | Kept | Loaded | Anew | Failed


CHECKPOINT_COMMANDS = Codec[CheckpointCommand](SaveCheckpoint, LoadCheckpoint, Reshard)
CHECKPOINT_ANSWERS = Codec[CheckpointAnswer](Saved, Kept, Loaded, Anew, Failed)
