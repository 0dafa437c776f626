"""Messages of a run's processes and nodes, with the codec of each connection.

Four connections: the supervisor and a worker, through the pipes of the process; the supervisor and the checkpoint
service; the supervisor and the compile service; and the first node and another one, over TCP, where children are named
by strings that only the first node interprets.

``member`` is the sender of a message, and ``number`` the number of a generation.
"""

from typing import Any, Literal, NamedTuple

from swift.elastic.membership.messages import (
    Connect,
    Departed,
    Done,
    Formed,
    FormGeneration,
    Heartbeat,
    Loaded,
    Member,
    Message,
    PhaseTimed,
    PreloadPrograms,
    Process,
    Ready,
    RecutFailed,
    ShardLayout,
    StartGeneration,
    StateId,
)
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.topology import Worker
from swift.typed import Codec


class Begin(NamedTuple):
    """First command to every member: until it comes, the process has imported all that it needs, and has no devices.

    Attributes:
        done: iterations that the run has done.
    """

    done: int


class FormGroup(NamedTuple):
    """``FormGeneration`` as members receive it.

    Attributes:
        form: generation to form.
        address: address of its coordination service.
    """

    form: FormGeneration
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
    stamp: StateId
    loss: float | None


class SnapshotMissed(NamedTuple):
    """A member cannot keep its part of a state that was to be saved.

    Attributes:
        stamp: stamp of the state.
        reason: reason, in a few words.
    """

    member: Member
    stamp: StateId
    reason: str


class DataUnreadable(NamedTuple):
    """The data of the next iteration, or of an evaluation, cannot be read; the member waits for another generation.

    ``why`` is the reason, in a line.
    """

    member: Member
    number: int
    reason: str


WorkerCommand = Begin | FormGroup | PreloadPrograms | Connect | StartGeneration | Halt | Hang | Stop
WorkerMessage = Message | Record | Planned | SnapshotKept | SnapshotMissed | DataUnreadable

WORKER_COMMANDS = Codec[WorkerCommand](Begin, FormGroup, PreloadPrograms, Connect, StartGeneration, Halt, Hang, Stop)
WORKER_MESSAGES = Codec[WorkerMessage](
    *(Ready, Departed, Formed, Heartbeat, PhaseTimed, RecutFailed, Loaded, Done),
    *(Record, Planned, SnapshotKept, SnapshotMissed, DataUnreadable),
    implied=("member", "time"),  # the supervisor knows the sender of a line, and when it came
)


class SaveCheckpoint(NamedTuple):
    """Write a checkpoint of the parts that processes have kept.

    Attributes:
        stamp: stamp of the state.
        holders: processes that have kept its parts: of whole workers that together have every block, each rank of them.
        is_full: whether to save all experts, whatever K is.
        is_elsewhere: whether to save it where there is room, as it cannot be written into the run directory.
        cut: workers that hold each block of the parts; False: as in the run.
    """

    stamp: StateId
    holders: tuple[Process, ...]
    is_full: bool = False
    is_elsewhere: bool = False
    cut: ChunkAssignment = DEFAULT_ASSIGNMENT


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

    stamp: StateId
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

    stamp: StateId
    lines: list[str]
    facts: dict[str, Any]
    is_resharded: bool = False
    is_origin: bool = False


class CommandFailed(NamedTuple):
    """A command has failed.

    Attributes:
        what: the command.
        step: its iteration; None if the newest checkpoint was requested and there is none.
        reason: reason, in a line.
        generation: generation that waits for a state; 0: none.
    """

    what: Literal["save", "load", "reshard"]
    step: int | None
    reason: str
    generation: int = 0


CheckpointCommand = SaveCheckpoint | LoadCheckpoint | Reshard
CheckpointAnswer = Saved | KeptElsewhere | StateRestored | CommandFailed

CHECKPOINT_COMMANDS = Codec[CheckpointCommand](SaveCheckpoint, LoadCheckpoint, Reshard)
CHECKPOINT_ANSWERS = Codec[CheckpointAnswer](Saved, KeptElsewhere, StateRestored, CommandFailed)


class CompileRequest(NamedTuple):
    """Prepare programs for what may come next; replaces earlier requests that were not begun.

    Attributes:
        failed: failure set.
        num_ranks: number of live expert ranks of an elastic run; None: it does not change.
        cut: workers that hold each block at present; False: as in the run.
        seeks_cut: whether to look for a better cut, too, where the run moves blocks.
    """

    failed: frozenset[Worker]
    num_ranks: int | None = None
    cut: ChunkAssignment = DEFAULT_ASSIGNMENT
    seeks_cut: bool = True


class Prepared(NamedTuple):
    """The programs of a configuration are in the executable cache.

    Attributes:
        failed: failure set of the configuration.
        num_ranks: its number of expert ranks; None: it does not change.
        kinds: kinds of its programs, see ``Steps``.
        compiled: number of programs that had to be compiled.
        seconds: duration, in seconds.
        before: workers that hold each block until then; False: as in the run.
    """

    failed: frozenset[Worker]
    num_ranks: int | None
    kinds: tuple[str, ...]
    compiled: int
    seconds: float
    before: ChunkAssignment = DEFAULT_ASSIGNMENT


class CutPrepared(NamedTuple):
    """The programs of a better cut for the survivors of some failures are in the executable cache.

    Attributes:
        failed: failure set.
        cut: workers that hold each block.
        microbatches: micro-batches of each pipeline.
        gain: share of the planned time of a re-routed iteration that it saves.
        most_bytes: bytes of state that the worker that gets the most of them has to copy.
        seconds: duration, in seconds.
    """

    failed: frozenset[Worker]
    cut: ChunkAssignment
    microbatches: tuple[int, ...]
    gain: float
    most_bytes: float
    seconds: float


class Alive(NamedTuple):
    """A heartbeat, sent regularly, also during a compilation."""


class CompileFailed(NamedTuple):
    """The programs of a configuration could not be prepared; processes that need them compile, and may fail, too."""

    reason: str


CompileAnswer = Prepared | CutPrepared | CompileFailed | Alive

COMPILE_REQUESTS = Codec[CompileRequest](CompileRequest)
COMPILE_ANSWERS = Codec[CompileAnswer](Prepared, CutPrepared, CompileFailed, Alive)


class StartChild(NamedTuple):
    """Command to a node: start a child."""

    child: str
    command: list[str]
    log: str


class PrespawnChild(NamedTuple):
    """Command to a node: hold a child ready, see ``Children.hold``."""

    child: str
    command: list[str]
    log: str


class SendToChild(NamedTuple):
    """Command to a node: send a line to a child."""

    child: str
    line: str


class SignalChild(NamedTuple):
    """Command to a node: send a signal to a child."""

    child: str
    number: int


class EndNode(NamedTuple):
    """Command to a node: the run no longer needs it.

    Attributes:
        is_finished: whether the run has finished; otherwise it was stopped, and may be resumed.
    """

    is_finished: bool


class ChildSent(NamedTuple):
    """Report to the first node: a child has sent a line."""

    child: str
    line: str


class ChildDied(NamedTuple):
    """Report to the first node: a child has died; sent after all its lines."""

    child: str
    reason: str


class NodeHeartbeat(NamedTuple):
    """Heartbeat, in either direction."""


class NodeUpdate(NamedTuple):
    """Notice on the first node: a node has connected, or is lost."""

    node: int
    is_there: bool


NodeMessage = StartChild | PrespawnChild | SendToChild | SignalChild | EndNode | ChildSent | ChildDied | NodeHeartbeat

NODE_MESSAGES = Codec[NodeMessage](
    *(StartChild, PrespawnChild, SendToChild, SignalChild, EndNode),
    *(ChildSent, ChildDied, NodeHeartbeat),
)
NODE_UPDATES = Codec[NodeUpdate](NodeUpdate)
