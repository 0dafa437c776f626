"""The membership of a run of several processes.

A state machine that decides which processes form each generation and how the run recovers from failures: pure functions
of events and times, without JAX and without a clock. The supervisor reports the events and carries out the commands.
``failure_detector`` finds processes that have stopped responding, and ``shard_ownership`` the slices of a state that
still exist.
"""

from swift.elastic.membership.commands import (
    Command,
    Enter,
    Form,
    GiveUp,
    GoLive,
    Kill,
    ReshardState,
    RestartAll,
    RestoreState,
    Retire,
    StageLost,
    StartGeneration,
    StartProcess,
    StopRun,
)
from swift.elastic.membership.events import (
    PARTS,
    CheckpointsListed,
    Departed,
    Died,
    Done,
    Event,
    FaultInjected,
    Formed,
    Heartbeat,
    MayRestart,
    Message,
    PartTimed,
    Ready,
    Restored,
    RestoreFailed,
    Started,
    Tick,
    Woke,
)
from swift.elastic.membership.members import (
    Holders,
    Member,
    Process,
    ShardLayout,
    Stamp,
    agreed_stamp,
    lost_stages,
    processes_of,
    whole_workers,
)
from swift.elastic.membership.process_status import ProcessState, ProcessStatus
from swift.elastic.membership.run_status import RecoveryPolicy
from swift.elastic.membership.shard_ownership import FoundSlices
from swift.elastic.membership.state_machine import Membership

__all__ = [
    "PARTS",
    "CheckpointsListed",
    "Command",
    "Departed",
    "Died",
    "Done",
    "Enter",
    "Event",
    "FaultInjected",
    "Form",
    "Formed",
    "FoundSlices",
    "GiveUp",
    "GoLive",
    "Heartbeat",
    "Holders",
    "Kill",
    "MayRestart",
    "Member",
    "Membership",
    "Message",
    "PartTimed",
    "Process",
    "ProcessState",
    "ProcessStatus",
    "Ready",
    "RecoveryPolicy",
    "ReshardState",
    "RestartAll",
    "RestoreFailed",
    "RestoreState",
    "Restored",
    "Retire",
    "ShardLayout",
    "StageLost",
    "Stamp",
    "StartGeneration",
    "StartProcess",
    "Started",
    "StopRun",
    "Tick",
    "Woke",
    "agreed_stamp",
    "lost_stages",
    "processes_of",
    "whole_workers",
]
