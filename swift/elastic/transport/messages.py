"""The messages between a run's processes and nodes, with a codec for each direction of a connection.

There are four kinds of connections. The supervisor talks to workers, to the checkpoint service and to the compile
service through the pipes of the child process. The first node talks to each other node over TCP; in these messages,
children are named by strings that only the first node interprets.

Fields that many messages share: ``member`` is the sender of a message, and ``number`` the number of a generation.
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
    """First command to every worker. Until it arrives, a prespawned worker has done its imports but has no devices.

    Attributes:
        done: number of iterations that the run has completed.
    """

    done: int


class FormGroup(NamedTuple):
    """``FormGeneration`` as members receive it, with the address to connect to.

    Attributes:
        form: generation to form.
        address: address of the generation's coordination service.
    """

    form: FormGeneration
    address: str


class Halt(NamedTuple):
    """Command to all members of a generation: stop after iteration ``after`` and store a snapshot."""

    number: int
    after: int


class Hang(NamedTuple):
    """Command to a member, for fault injection: never finish the next iteration."""


class Stop(NamedTuple):
    """Command to a member: exit."""


class Record(NamedTuple):
    """The metrics of an iteration, as in ``metrics.jsonl``."""

    record: dict[str, Any]


class Planned(NamedTuple):
    """The plan of generation ``number``, as returned by ``plan_facts``."""

    number: int
    facts: dict[str, Any]


class SnapshotKept(NamedTuple):
    """A member has stored its part of a snapshot, without slots.

    Attributes:
        stamp: stamp of the state.
        loss: loss of this state on a batch that is not trained on, in nats per token; None if there was no time to
            compute it.
    """

    member: Member
    stamp: StateId
    loss: float | None


class SnapshotMissed(NamedTuple):
    """A member could not store its part of a snapshot, so that the state cannot be saved.

    Attributes:
        stamp: stamp of the state.
        reason: cause, in a few words.
    """

    member: Member
    stamp: StateId
    reason: str


class DataUnreadable(NamedTuple):
    """The data for the next iteration or for an evaluation cannot be read; the member waits for another generation.

    ``reason`` is the cause, in one line.
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
    implied=("member", "time"),  # the supervisor knows the sender of a line, and when it arrived
)


class SaveCheckpoint(NamedTuple):
    """Request to write a checkpoint from the parts that processes have stored.

    Attributes:
        stamp: stamp of the state.
        holders: processes whose parts to use: all ranks of a set of workers that together have every block.
        is_full: whether to save all experts, whatever K is.
        is_elsewhere: whether to save it outside the run directory, because the run directory cannot be written.
        cut: workers that hold each block of the parts; falsy for the run's own cut.
    """

    stamp: StateId
    holders: tuple[Process, ...]
    is_full: bool = False
    is_elsewhere: bool = False
    cut: ChunkAssignment = DEFAULT_ASSIGNMENT


class LoadCheckpoint(NamedTuple):
    """Request to read a checkpoint and to store the part of each process.

    Attributes:
        step: iteration of the checkpoint; None for the newest intact one.
        generation: generation of the stamp under which the parts are stored.
        processes: processes of that generation.
    """

    step: int | None
    generation: int
    processes: tuple[Process, ...]


class Reshard(NamedTuple):
    """Request to reshard a state for the ranks of a generation and to store each process's part.

    Attributes:
        stamp: stamp of the state, whose slices processes have handed over.
        layout: present layout of the state.
        generation: generation of the stamp under which the parts are stored.
        processes: processes of that generation.
    """

    stamp: StateId
    layout: ShardLayout
    generation: int
    processes: tuple[Process, ...]


class Saved(NamedTuple):
    """A checkpoint has been written into the run directory.

    Attributes:
        step: last iteration that the checkpoint contains.
        seconds: duration of the save, in seconds.
        path: name of the checkpoint's directory.
        facts: further fields for the event in ``events.jsonl``, see ``save_facts``.
    """

    step: int
    seconds: float
    path: str
    facts: dict[str, Any]


class KeptElsewhere(NamedTuple):
    """A checkpoint has been written outside the run directory.

    Attributes:
        step: last iteration that the checkpoint contains.
        text: line that tells the user its location and how to resume from it.
    """

    step: int
    text: str


class StateRestored(NamedTuple):
    """A state has been loaded or resharded, and the parts of all processes are stored.

    Attributes:
        stamp: stamp under which the parts are stored.
        lines: lines for the terminal on where the state, or the slices of lost ranks, came from.
        facts: the same information, as fields for the event in ``events.jsonl``.
        is_resharded: whether the state was resharded rather than loaded from a checkpoint.
        is_origin: whether the state is the initial one, with the weights of another run.
    """

    stamp: StateId
    lines: list[str]
    facts: dict[str, Any]
    is_resharded: bool = False
    is_origin: bool = False


class CommandFailed(NamedTuple):
    """A request to the checkpoint service has failed.

    Attributes:
        what: kind of request.
        step: iteration of the request; None if the newest checkpoint was requested and there is none.
        reason: cause, in one line.
        generation: generation that waits for a state; 0 if none.
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
    """Request to prepare programs for the present configuration and the next ones; replaces all earlier requests.

    Attributes:
        failed: workers that are down.
        num_ranks: number of live expert ranks of an elastic run; None if the run is not elastic.
        cut: workers that hold each block at present; falsy for the run's own cut.
        seeks_cut: whether to search for a better cut as well, if the run moves blocks.
    """

    failed: frozenset[Worker]
    num_ranks: int | None = None
    cut: ChunkAssignment = DEFAULT_ASSIGNMENT
    seeks_cut: bool = True


class Prepared(NamedTuple):
    """The programs of a configuration are in the executable cache.

    Attributes:
        failed: workers that are down in the configuration.
        num_ranks: number of expert ranks; None if the run is not elastic.
        kinds: kinds of programs, see ``Steps``.
        compiled: number of programs that had to be compiled.
        seconds: time that this took, in seconds.
        before: workers that hold each block before the change to the configuration; falsy for the run's own cut.
    """

    failed: frozenset[Worker]
    num_ranks: int | None
    kinds: tuple[str, ...]
    compiled: int
    seconds: float
    before: ChunkAssignment = DEFAULT_ASSIGNMENT


class CutPrepared(NamedTuple):
    """The executable cache contains the programs for a better cut for the survivors of some failures.

    Attributes:
        failed: workers that are down.
        cut: workers that hold each block.
        microbatches: number of micro-batches of each pipeline.
        gain: planned saving, as a share of the time of a re-routed iteration.
        most_bytes: bytes of state to copy, for the worker that has to copy the most.
        seconds: time that planning and compiling took, in seconds.
    """

    failed: frozenset[Worker]
    cut: ChunkAssignment
    microbatches: tuple[int, ...]
    gain: float
    most_bytes: float
    seconds: float


class Alive(NamedTuple):
    """A heartbeat of the compile service, which is also sent during a compilation."""


class CompileFailed(NamedTuple):
    """The programs of a configuration could not be prepared; workers that need them try to compile them."""

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
    """Command to a node: prespawn a child, see ``Children.hold``."""

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
    """Command to a node: stop serving the run.

    Attributes:
        is_finished: whether the run has finished; otherwise it was stopped and may be resumed.
    """

    is_finished: bool


class ChildSent(NamedTuple):
    """Report to the first node: a child has sent a line."""

    child: str
    line: str


class ChildDied(NamedTuple):
    """Report to the first node: a child has died; sent after all lines of the child."""

    child: str
    reason: str


class NodeHeartbeat(NamedTuple):
    """Heartbeat between two nodes, in either direction."""


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
