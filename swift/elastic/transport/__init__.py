"""Processes and nodes of a run, and the messages between them.

Child processes, on one node and on several; how nodes find, authenticate and serve each other; and the messages of
workers, of the two services and of nodes, which share one codec.
"""

from swift.elastic.transport.admission import Admission
from swift.elastic.transport.checkpoint_messages import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    CheckpointAnswer,
    CheckpointCommand,
    CommandFailed,
    KeptElsewhere,
    LoadCheckpoint,
    Reshard,
    SaveCheckpoint,
    Saved,
    StateRestored,
)
from swift.elastic.transport.child_processes import MEMORY, Children, LocalChildren
from swift.elastic.transport.compile_messages import (
    COMPILE_ANSWERS,
    COMPILE_REQUESTS,
    Alive,
    CompileFailed,
    CompileRequest,
    CutPrepared,
    Prepared,
)
from swift.elastic.transport.handshake import MAX_BYTES, has_proof, line_of, proof
from swift.elastic.transport.multi_node_children import NODES, MultiNodeChildren
from swift.elastic.transport.node_messages import NODE_UPDATES, NodeUpdate
from swift.elastic.transport.remote_node import announcing_arrival, serve_node
from swift.elastic.transport.rendezvous import Rendezvous, check_network
from swift.elastic.transport.worker_messages import (
    WORKER_COMMANDS,
    WORKER_MESSAGES,
    Begin,
    DataUnreadable,
    FormGroup,
    Halt,
    Hang,
    Planned,
    Record,
    SnapshotKept,
    SnapshotMissed,
    Stop,
    WorkerCommand,
    WorkerMessage,
)

__all__ = [
    "CHECKPOINT_ANSWERS",
    "CHECKPOINT_COMMANDS",
    "COMPILE_ANSWERS",
    "COMPILE_REQUESTS",
    "MAX_BYTES",
    "MEMORY",
    "NODES",
    "NODE_UPDATES",
    "WORKER_COMMANDS",
    "WORKER_MESSAGES",
    "Admission",
    "Alive",
    "Begin",
    "CheckpointAnswer",
    "CheckpointCommand",
    "Children",
    "CommandFailed",
    "CompileFailed",
    "CompileRequest",
    "CutPrepared",
    "DataUnreadable",
    "FormGroup",
    "Halt",
    "Hang",
    "KeptElsewhere",
    "LoadCheckpoint",
    "LocalChildren",
    "MultiNodeChildren",
    "NodeUpdate",
    "Planned",
    "Prepared",
    "Record",
    "Rendezvous",
    "Reshard",
    "SaveCheckpoint",
    "Saved",
    "SnapshotKept",
    "SnapshotMissed",
    "StateRestored",
    "Stop",
    "WorkerCommand",
    "WorkerMessage",
    "announcing_arrival",
    "check_network",
    "has_proof",
    "line_of",
    "proof",
    "serve_node",
]
