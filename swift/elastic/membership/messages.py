"""The vocabulary of membership: process and state identities, commands, and events.

The identities ``Process``, ``Member`` and ``StateId`` come first, with functions that determine which stages a set of
processes can serve. The supervisor carries out every ``Command`` of the membership, and reports every ``Event``: its
own observations and the messages of processes.

Fields that many events and commands share: ``member`` is the process that an event is about, or the sender of a
message; ``number`` is the number of a generation; ``time`` is when the supervisor observed the event or received the
message, in seconds on any monotonic clock.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.topology import Topology, Worker


class Process(NamedTuple):
    """A process in a run, identified across restarts: a whole worker, or one of its expert ranks.

    Attributes:
        worker: (pipeline, stage).
        rank: expert rank; 0 if the process holds all expert ranks.
    """

    worker: Worker
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker[0]}:{self.worker[1]}" + (f" rank {self.rank}" if self.rank else "")


class Member(NamedTuple):
    """One incarnation of a process; ``incarnation`` increases by one with every restart."""

    process: Process
    incarnation: int


class StateId(NamedTuple):
    """A training state's stamp: copies of a stage's state with the same stamp are bit-identical.

    The iteration alone would not identify a state. After a failure, an iteration may be re-run by different members,
    which add floating-point numbers in a different order and therefore get a different result. A generation always
    resumes from a state of an earlier one, so the order of stamps is the order in which states were computed.

    Attributes:
        generation: generation that computed or restored the state.
        step: last iteration that the state contains.
    """

    generation: int
    step: int


class ShardLayout(NamedTuple):
    """The sharding of an elastic run's state: one slice per rank, where the rank count may change.

    Attributes:
        processes: owners of the slices, in rank order.
        generations: consecutive generations that used this layout without losing state.
    """

    processes: tuple[Process, ...]
    generations: tuple[int, ...]


FoundSlices = frozenset[tuple[Process, StateId]]
"""Pairs (owner, state) of slices that exist as copies outside the process that owns them."""


def processes_of(topology: Topology, *, by_rank: bool = False) -> tuple[Process, ...]:
    """Returns all processes of a run: one per worker, or with ``by_rank`` one per expert rank.

    >>> [str(process) for process in processes_of(Topology(1, 2, 2), by_rank=True)]
    ['0:0', '0:0 rank 1', '0:1', '0:1 rank 1']
    """
    ranks = range(topology.num_expert_ranks if by_rank else 1)
    return tuple(Process(worker, rank) for worker in topology.workers for rank in ranks)


def complete_workers(processes: Collection[Process], present: Collection[Process]) -> frozenset[Worker]:
    """Returns the workers all of whose processes are present."""
    available = frozenset(present)
    return frozenset(worker for worker, _ in processes) - {
        process.worker for process in processes if process not in available
    }


def lost_stages(
    processes: Collection[Process],
    present: Collection[Process],
    *,
    is_elastic: bool = False,
    own_cut: ChunkAssignment = DEFAULT_ASSIGNMENT,
) -> tuple[int, ...]:
    """Returns the stages that no complete worker or, in an elastic run, no process at all can serve.

    If pipelines cut the layers differently, a stage is also lost when one of its chunks, in any pipeline, has no
    complete worker that holds it.

    >>> lost_stages(processes_of(Topology(2, 2)), [Process((0, 0)), Process((1, 0))])
    (1,)
    >>> lost_stages(processes_of(Topology(1, 1, 2), by_rank=True), [Process((0, 0), rank=1)])
    (0,)
    >>> apart = ChunkAssignment(((0, 0, 1), (0, 1, 1)))
    >>> lost_stages(processes_of(Topology(2, 2)), [Process((0, 1)), Process((1, 0))], own_cut=apart)
    (0, 1)
    """
    workers = {process.worker for process in present} if is_elastic else complete_workers(processes, present)
    lost = {stage for (_, stage), _ in processes} - {stage for _, stage in workers}
    for chunk in own_cut.lost_chunks(workers):
        lost.update(stages[chunk] for stages in own_cut.stage_of_chunk)
    return tuple(sorted(lost))


def covers_whole_state(
    processes: Collection[Process], holders: Collection[Process], cut: ChunkAssignment = DEFAULT_ASSIGNMENT
) -> bool:
    """Returns whether the complete workers among the holders together have the whole state.

    If pipelines cut the layers differently, these workers need not cover every stage: one worker may hold the chunks of
    several stages.

    Args:
        processes: all processes of the run.
        holders: processes that have their part of the state.
        cut: workers that hold each chunk in this state.

    >>> processes = processes_of(Topology(2, 2))
    >>> covers_whole_state(processes, processes[:2]), covers_whole_state(processes, processes[:1])
    (True, False)
    >>> covers_whole_state(processes, processes[:1], ChunkAssignment(((0, 0), (0, 1))))
    True
    """
    complete = complete_workers(processes, holders)
    return not cut.lost_chunks(complete) if cut else not lost_stages(processes, holders)


def newest_complete_state(
    processes: Collection[Process],
    held_by: Mapping[Process, frozenset[StateId]],
    cut_of: Callable[[int], ChunkAssignment] = lambda generation: DEFAULT_ASSIGNMENT,  # noqa: ARG005
) -> StateId | None:
    """Returns the newest state that members can assemble from their parts, or None if there is none.

    Args:
        processes: all processes of the run.
        held_by: for each member, the states that it has its part of.
        cut_of: maps a generation to the workers that hold each chunk in its states.

    >>> processes = processes_of(Topology(2, 2))
    >>> held = [{StateId(1, 5), StateId(1, 6)}, {StateId(1, 5)}, {StateId(1, 4), StateId(1, 5)}, {StateId(0, 9)}]
    >>> newest_complete_state(processes, dict(zip(processes, map(frozenset, held))))
    StateId(generation=1, step=5)
    """
    for stamp in sorted(frozenset().union(*held_by.values()), reverse=True):
        holders = [process for process, states in held_by.items() if stamp in states]
        if covers_whole_state(processes, holders, cut_of(stamp.generation)):
            return stamp
    return None


class FormGeneration(NamedTuple):
    """Command to all members: leave the current generation and join this one; each answers ``Departed``.

    Attributes:
        number: number of the new generation, larger than all earlier ones.
        members: members of the new generation, sorted by process.
        after: iteration to finish before leaving; None to abort the current iteration at once.
        cut: workers that hold each block in the new generation; falsy for the run's own cut.
    """

    number: int
    members: tuple[Member, ...]
    after: int | None = None
    cut: ChunkAssignment = DEFAULT_ASSIGNMENT

    @property
    def stays_connected(self) -> bool:
        """Whether members keep their connections and devices, since only blocks move between the live members."""
        return bool(self.cut)


class PreloadPrograms(NamedTuple):
    """Command to all members of a live generation: load the next one's programs while training; answer ``Loaded``.

    Attributes:
        number: number of the live generation.
        members: members of the live generation, which are also those of the next one.
        cut: workers that will hold each block in the next generation.
    """

    number: int
    members: tuple[Member, ...]
    cut: ChunkAssignment


class Connect(NamedTuple):
    """Command to all members, once all have left the old generation: connect to each other; each answers ``Formed``."""

    number: int
    members: tuple[Member, ...]


class ActivateGeneration(NamedTuple):
    """Makes a generation live, once all members have formed it; the supervisor reports ``CheckpointsListed``.

    Attributes:
        number: number of the generation.
        stamp: state to resume from; None if the members have no common state.
        holders: members that have this state; the others copy it from a peer.
        layout: layout of this state if it has to be resharded before the members can use it; None otherwise.
        is_whole: whether all slices of the state exist; otherwise older states have to fill the gaps.
        cut: workers that hold each block of this state; falsy for the run's own cut.
    """

    number: int
    stamp: StateId | None
    holders: tuple[Member, ...] = ()
    layout: ShardLayout | None = None
    is_whole: bool = True
    cut: ChunkAssignment = DEFAULT_ASSIGNMENT


class RestoreState(NamedTuple):
    """Loads the newest checkpoint for the members of a generation; the supervisor reports ``Restored``."""

    number: int


class ReshardState(NamedTuple):
    """Reshards a state for the members of a generation; the supervisor reports ``Restored``.

    Attributes:
        number: number of the generation.
        stamp: state to reshard.
        layout: present layout of the state.
    """

    number: int
    stamp: StateId
    layout: ShardLayout


class StartGeneration(NamedTuple):
    """Command to all members: start training.

    Attributes:
        go: command that made the generation live: the state to resume from, and which members have it.
        written: last iteration whose record has been written to the log.
        is_restored: whether the state was loaded or resharded, and so is among the snapshots of every member.
    """

    go: ActivateGeneration
    written: int = 0
    is_restored: bool = False


class Kill(NamedTuple):
    """Kills a process if it still exists; ``Died`` follows, or ``Retire`` if the process does not die."""

    member: Member
    reason: str


class Retire(NamedTuple):
    """Gives up on a killed process that does not die: it is never restarted, and nothing else starts on its node."""

    member: Member
    reason: str


class StartProcess(NamedTuple):
    """Restarts a dead process; the supervisor reports ``Started``."""

    process: Process


class RestartAll(NamedTuple):
    """Kills and restarts all processes, for instance because the one at fault cannot be identified."""

    reason: str


class StageLost(NamedTuple):
    """Reports that no process is left for these stages, or for layers of them: training waits until one rejoins."""

    stages: tuple[int, ...]


class ExcludeProcess(NamedTuple):
    """Reports that a process has died at its start too often in a row, and that the others continue without it."""

    process: Process
    reason: str


class AbortRun(NamedTuple):
    """Stops the run: a process dies repeatedly at its start, and the others cannot continue without it."""

    process: Process
    reason: str


class StopRun(NamedTuple):
    """Stops the run, because it cannot continue.

    Attributes:
        reason: why the run cannot continue, as text for the user.
        remedy: what the user can do; None for the usual advice, to resume from the newest checkpoint.
    """

    reason: str
    remedy: str | None = None


Command = (
    (FormGeneration | PreloadPrograms | Connect | ActivateGeneration | RestoreState | ReshardState | StartGeneration)
    | (Kill | Retire | StartProcess | RestartAll)
    | (StageLost | ExcludeProcess | AbortRun | StopRun)
)
Commands = tuple[Command, ...]


class Started(NamedTuple):
    """A process has been started, for the first time or after its death."""

    member: Member
    time: float


class Ready(NamedTuple):
    """A process is waiting for the next generation; ``number`` is the one that it could not continue, 0 if none."""

    member: Member
    time: float
    number: int = 0


class Died(NamedTuple):
    """A process is known to be dead: its exit status was collected, or it can never be reached again.

    Attributes:
        reason: cause, in a few words.
        is_own: whether the process itself failed, rather than its node.
    """

    member: Member
    time: float
    reason: str
    is_own: bool = True


class Departed(NamedTuple):
    """A member has stored its part of the state and left the old generation, to join generation ``number``."""

    member: Member
    number: int
    time: float


class Formed(NamedTuple):
    """A member is connected to the others and ready to run.

    Attributes:
        states: states that the member has its part of; may be empty.
        known_slices: copies of other processes' slices that the member knows of.
    """

    member: Member
    number: int
    states: frozenset[StateId]
    time: float
    known_slices: FoundSlices = frozenset()


class Heartbeat(NamedTuple):
    """A heartbeat of a process, with its progress.

    Attributes:
        number: generation that the process runs; 0 if none.
        entered: newest iteration, counted from 1, that the process has begun in this generation; 0 if none yet.
        finished: newest iteration that the process has finished; 0 if none yet.
    """

    member: Member
    number: int
    entered: int
    finished: int
    time: float


class PhaseTimed(NamedTuple):
    """The time that a member took for one phase of the transition between two generations.

    The end of phase ``connect`` also starts a longer deadline: from then on the member may have to compile.

    Attributes:
        number: generation that is being formed.
        phase: one of ``PHASES``.
        seconds: duration of the phase.
    """

    member: Member
    number: int
    phase: str
    seconds: float
    time: float


PHASES = ("leave", "connect", "load_program", "state", "first_step")
"""Phases of a transition, from ``FormGeneration`` to the end of a member's first iteration: copying the state to the
host and releasing the devices, connecting to the other members, loading or compiling the program, restoring the state
on the devices, and running one iteration."""


class RecutFailed(NamedTuple):
    """A member cannot take part in a move of blocks.

    Attributes:
        number: the new generation if the member could not form it and now waits for another one, or the live generation
            if the member could not preload the programs and keeps training.
        reason: cause, in a few words.
    """

    member: Member
    number: int
    reason: str
    time: float


class Loaded(NamedTuple):
    """A member has preloaded the next generation's programs, or could not and will load them when that one forms.

    Attributes:
        number: live generation, which the member keeps running meanwhile.
    """

    member: Member
    number: int
    time: float


class Done(NamedTuple):
    """A member has run all iterations of this generation."""

    member: Member
    number: int
    time: float


class FaultInjected(NamedTuple):
    """A fault was injected into a process, so its death does not count towards the restart limit."""

    member: Member
    time: float


class ClockJumped(NamedTuple):
    """The supervisor was suspended, and has not yet read the messages that were sent meanwhile."""

    time: float


class CheckpointsListed(NamedTuple):
    """The checkpoints that exist when a generation goes live.

    Attributes:
        newest: iteration of the newest checkpoint; None if there is none.
        is_full: whether that checkpoint is intact and has every expert's state after that iteration.
        is_busy: whether a save or a load is still in progress.
        written: last iteration whose record has been written to the log.
    """

    time: float
    newest: int | None = None
    is_full: bool = False
    is_busy: bool = False
    written: int = 0


class Restored(NamedTuple):
    """The state for a generation was loaded or resharded, and is now among the snapshots of every member.

    Attributes:
        stamp: stamp of the state; its generation is the one that waits for the state.
        written: last iteration whose record has been written to the log.
    """

    stamp: StateId
    time: float
    written: int = 0


class RestoreFailed(NamedTuple):
    """The state for a generation could not be loaded or resharded.

    Attributes:
        number: generation that waits for the state.
        reason: what is lost, as text for the user.
        remedy: what the user can do; None for the usual advice, to resume from the newest checkpoint.
    """

    number: int
    time: float
    reason: str
    remedy: str | None = None


class RecutReady(NamedTuple):
    """A better cut for the survivors of some failures was found, and its programs are compiled.

    Attributes:
        failed: workers that are down.
        cut: workers that hold each block in the better cut.
        gain: planned saving, as a share of the time of a re-routed iteration.
        most_bytes: bytes of state to copy, for the worker that has to copy the most.
    """

    time: float
    failed: frozenset[Worker]
    cut: ChunkAssignment
    gain: float
    most_bytes: float


@dataclass(frozen=True)
class MayRestart:
    """Dead processes may be restarted now.

    Attributes:
        away: for each process on a lost node, the number of seconds since the node was lost.
        held_down: processes that fault injection keeps down for now.
    """

    time: float
    away: Mapping[Process, float] = field(default_factory=dict)
    held_down: frozenset[Process] = frozenset()


class StopRequested(NamedTuple):
    """The run is to stop once its members finish an iteration: no other process is admitted, and no blocks move."""

    time: float


class Tick(NamedTuple):
    """All observations so far have been reported, so the membership decides now."""

    time: float


Message = Ready | Departed | Formed | Heartbeat | PhaseTimed | RecutFailed | Loaded | Done
"""Events that processes send; the supervisor observes the others."""
Event = (Started | Died | FaultInjected | Message | ClockJumped | Tick) | (
    CheckpointsListed | Restored | RestoreFailed | RecutReady | MayRestart | StopRequested
)
