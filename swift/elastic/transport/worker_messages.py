"""Messages between the supervisor and a worker process, through the pipes of the process.

``member`` is the sender of a message, and ``number`` the number of a generation.
"""

from typing import Any, NamedTuple

from swift.elastic.membership.commands import Enter, Form, LoadAhead, StartGeneration
from swift.elastic.membership.events import (
    CutRefused,
    Departed,
    Done,
    Formed,
    Heartbeat,
    Loaded,
    Message,
    PhaseTimed,
    Ready,
)
from swift.elastic.membership.members import Member, Stamp
from swift.elastic.transport.codec import Codec


class Begin(NamedTuple):
    """First command to every member: until it comes, the process has imported all that it needs, and has no devices.

    Attributes:
        done: iterations that the run has done.
    """

    done: int


class FormGroup(NamedTuple):
    """``Form`` as members receive it.

    Attributes:
        form: generation to form.
        address: address of its coordination service.
    """

    form: Form
    address: str


class Halt(NamedTuple):
    """Command to all members of a generation: keep a snapshot after iteration ``after``, and run no further."""

    number: int
    after: int


class Hang(NamedTuple):
    """Command to a member: never end the next iteration."""


class Stop(NamedTuple):
    """Command to a member: end the process."""


class Record(NamedTuple):
    """The results of an iteration, see ``metrics.jsonl``."""

    record: dict[str, Any]


class Planned(NamedTuple):
    """The plan of a generation, see ``plan_facts``."""

    number: int
    facts: dict[str, Any]


class SnapshotKept(NamedTuple):
    """A member has its part of a state, without slots, among its snapshots.

    Attributes:
        stamp: stamp of the state.
        loss: loss of this state on a batch that is not trained on, in nats per token; None: there was no time for it.
    """

    member: Member
    stamp: Stamp
    loss: float | None


class SnapshotMissed(NamedTuple):
    """A member cannot keep its part of a state that was to be saved.

    Attributes:
        stamp: stamp of the state.
        why: reason, in a few words.
    """

    member: Member
    stamp: Stamp
    why: str


class DataUnreadable(NamedTuple):
    """The data of the next iteration, or of an evaluation, cannot be read; the member waits for another generation.

    ``why`` is the reason, in a line.
    """

    member: Member
    number: int
    why: str


WorkerCommand = Begin | FormGroup | LoadAhead | Enter | StartGeneration | Halt | Hang | Stop
WorkerMessage = Message | Record | Planned | SnapshotKept | SnapshotMissed | DataUnreadable


WORKER_COMMANDS = Codec[WorkerCommand](Begin, FormGroup, LoadAhead, Enter, StartGeneration, Halt, Hang, Stop)
WORKER_MESSAGES = Codec[WorkerMessage](
    *(Ready, Departed, Formed, Heartbeat, PhaseTimed, CutRefused, Loaded, Done),
    *(Record, Planned, SnapshotKept, SnapshotMissed, DataUnreadable),
    implied=("member", "time"),  # the supervisor knows the sender of a line, and when it came
)
