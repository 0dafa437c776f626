"""The language of a run's membership: its processes and their states, the commands to them, and the events.

Identities come first: ``Process``, ``Member``, the ``StateId`` of a state, and the stages that the processes present
can serve. The supervisor carries out a ``Command`` of the membership, and reports every ``Event``: what it observes
itself, and messages of processes.

``member`` is the process that an event is about, or the sender of a message; ``number`` is the number of a generation;
``time`` is when the event was observed or received, in seconds of any monotonic clock.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.topology import Topology, Worker


class Process(NamedTuple):
    """A process of a run, through all its restarts: a whole worker, or one of its expert ranks.

    Attributes:
        worker: (pipeline, stage).
        rank: expert rank; 0 if the process has all of them.
    """

    worker: Worker
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker[0]}:{self.worker[1]}" + (f" rank {self.rank}" if self.rank else "")


class Member(NamedTuple):
    """One incarnation of a process; ``incarnation`` grows by one with every restart."""

    process: Process
    incarnation: int


class StateId(NamedTuple):
    """Identity of a state: states of the same stage with the same stamp are equal, bit for bit.

    After a failure an iteration may be run again by other members, whose sums have another order: that gives another
    state. A newer generation resumes from a state of those before, so stamps are ordered as states are computed.

    Attributes:
        generation: generation that computed or restored it.
        step: last iteration that it contains.
    """

    generation: int
    step: int


class ShardLayout(NamedTuple):
    """The division of a state into slices, one for each rank, in a run whose number of ranks may change.

    Attributes:
        processes: owners of the slices, in the order of their ranks.
        generations: consecutive generations that ran with this layout without losing state.
    """

    processes: tuple[Process, ...]
    generations: tuple[int, ...]


FoundSlices = frozenset[tuple[Process, StateId]]
"""(owner, state) of slices that are kept elsewhere than by their owner."""


def processes_of(topology: Topology, *, by_rank: bool = False) -> tuple[Process, ...]:
    """Returns all processes of a run, one for each worker or one for each expert rank.

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
    """Returns the stages without any complete worker; in an elastic run, without any process.

    Where pipelines are cut differently, also the stages that hold a chunk, in whichever pipeline, that no complete
    worker holds.

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


def covers_all_stages(
    processes: Collection[Process], holders: Collection[Process], cut: ChunkAssignment = DEFAULT_ASSIGNMENT
) -> bool:
    """Returns whether complete workers among the processes that have their parts of a state have all of it.

    Where pipelines are cut differently they need not be of every stage: one may have the chunks of several.

    Args:
        processes: all processes of the run.
        holders: those that have their parts.
        cut: workers that hold each chunk in this state.

    >>> processes = processes_of(Topology(2, 2))
    >>> covers_all_stages(processes, processes[:2]), covers_all_stages(processes, processes[:1])
    (True, False)
    >>> covers_all_stages(processes, processes[:1], ChunkAssignment(((0, 0), (0, 1))))
    True
    """
    complete = complete_workers(processes, holders)
    return not cut.lost_chunks(complete) if cut else not lost_stages(processes, holders)


def newest_common_state(
    processes: Collection[Process],
    held_by: Mapping[Process, frozenset[StateId]],
    cut_of: Callable[[int], ChunkAssignment] = lambda generation: DEFAULT_ASSIGNMENT,  # noqa: ARG005
) -> StateId | None:
    """Returns the newest state of which members have all parts; None if there is none.

    Args:
        processes: all processes of the run.
        held_by: states of which each member has its part.
        cut_of: function that returns the workers that hold each chunk in a generation's states.

    >>> processes = processes_of(Topology(2, 2))
    >>> held = [{StateId(1, 5), StateId(1, 6)}, {StateId(1, 5)}, {StateId(1, 4), StateId(1, 5)}, {StateId(0, 9)}]
    >>> newest_common_state(processes, dict(zip(processes, map(frozenset, held))))
    StateId(generation=1, step=5)
    """
    for stamp in sorted(frozenset().union(*held_by.values()), reverse=True):
        holders = [process for process, states in held_by.items() if stamp in states]
        if covers_all_stages(processes, holders, cut_of(stamp.generation)):
            return stamp
    return None


class FormGeneration(NamedTuple):
    """Command to all members: leave the current generation and join this one; each answers ``Departed``.

    Attributes:
        number: number of the generation, larger than any before.
        members: its members, sorted by process.
        after: iteration to finish before leaving; None: abort the current iteration at once.
        cut: workers that hold each block while it runs; False: as in the run.
    """

    number: int
    members: tuple[Member, ...]
    after: int | None = None
    cut: ChunkAssignment = DEFAULT_ASSIGNMENT

    @property
    def stays_connected(self) -> bool:
        """Returns whether the members keep the connections and devices of the live generation, which has the same."""
        return bool(self.cut)


class PreloadPrograms(NamedTuple):
    """Command to all members of a live generation: load the programs of the next one as they run; answer ``Loaded``.

    Attributes:
        number: number of the live generation.
        members: its members, which will be those of the next one.
        cut: workers that will hold each block.
    """

    number: int
    members: tuple[Member, ...]
    cut: ChunkAssignment


class Connect(NamedTuple):
    """Command to all members, once every one has left: connect to each other; each answers ``Formed``."""

    number: int
    members: tuple[Member, ...]


class ActivateGeneration(NamedTuple):
    """Make a generation live that all members have formed; the supervisor reports ``CheckpointsListed``.

    Attributes:
        stamp: state to resume from; None: the members have no common state.
        holders: members that have this state; the others copy it from a peer.
        layout: layout of this state if it has to be resharded before the members can use it; None otherwise.
        is_whole: whether all slices of the state exist; otherwise some have to come from older states.
        cut: workers that hold each block of this state; False: as in the run.
    """

    number: int
    stamp: StateId | None
    holders: tuple[Member, ...] = ()
    layout: ShardLayout | None = None
    is_whole: bool = True
    cut: ChunkAssignment = DEFAULT_ASSIGNMENT


class RestoreState(NamedTuple):
    """Load the newest checkpoint for the members of a generation; report ``Restored``."""

    number: int


class ReshardState(NamedTuple):
    """Reshard a state for the members of a generation; report ``Restored``.

    Attributes:
        stamp: state to reshard.
        layout: its present layout.
    """

    number: int
    stamp: StateId
    layout: ShardLayout


class StartGeneration(NamedTuple):
    """Command to all members: run.

    Attributes:
        go: command that made the generation live: its state, and which members have it.
        written: last iteration whose record is written.
        is_restored: whether the state was loaded or resharded, and is among every member's snapshots.
    """

    go: ActivateGeneration
    written: int = 0
    is_restored: bool = False


class Kill(NamedTuple):
    """Kill a process if it still exists; ``Died`` follows, or eventually ``Retire``."""

    member: Member
    reason: str


class Retire(NamedTuple):
    """Treat a killed process that does not die as dead; never restart it, nor start anything else on its node."""

    member: Member
    reason: str


class StartProcess(NamedTuple):
    """Restart a dead process; report ``Started``."""

    process: Process


class RestartAll(NamedTuple):
    """Kill and restart all processes: the one at fault cannot be identified."""

    reason: str


class StageLost(NamedTuple):
    """Report that no process is left to serve these stages, or layers of them; the next generation waits for one."""

    stages: tuple[int, ...]


class ExcludeProcess(NamedTuple):
    """Report that a process is restarted no more: the others continue without it."""

    process: Process
    reason: str


class AbortRun(NamedTuple):
    """Stop the run: a process dies repeatedly at its start, and the others cannot continue without it."""

    process: Process
    reason: str


class StopRun(NamedTuple):
    """Stop the run: it cannot continue.

    Attributes:
        reason: reason.
        remedy: what the user can do; None: resume from the newest checkpoint.
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
    """A process waits for the next generation. ``number``: the one that it could not continue, or 0."""

    member: Member
    time: float
    number: int = 0


class Died(NamedTuple):
    """A process is known to be dead: its exit status was collected, or it can never be reached again.

    Attributes:
        reason: cause, in a few words.
        is_own: whether the process itself failed, rather than the node that it ran on.
    """

    member: Member
    time: float
    reason: str
    is_own: bool = True


class Departed(NamedTuple):
    """A member has left the generation before ``number``, and has kept its part of the state."""

    member: Member
    number: int
    time: float


class Formed(NamedTuple):
    """A member is connected to the others and ready to run.

    Attributes:
        states: states of which it has its part; empty if none.
        known_slices: further slices whose location it knows.
    """

    member: Member
    number: int
    states: frozenset[StateId]
    time: float
    known_slices: FoundSlices = frozenset()


class Heartbeat(NamedTuple):
    """A heartbeat of a process, with its progress.

    Attributes:
        number: generation that it runs; 0: none.
        entered: newest iteration, from 1, that it has begun in this generation; 0: none yet.
        finished: newest iteration that it has finished; 0: none yet.
    """

    member: Member
    number: int
    entered: int
    finished: int
    time: float


class PhaseTimed(NamedTuple):
    """The time that a member took for one phase of the transition between two generations.

    Phase ``connect`` also means that it is connected to all the others: from then on it may have to compile.

    Attributes:
        number: generation that is being formed.
        phase: one of ``PHASES``.
        seconds: duration, in seconds.
    """

    member: Member
    number: int
    phase: str
    seconds: float
    time: float


PHASES = ("leave", "connect", "load_program", "state", "first_step")
"""Phases of a transition, from ``FormGeneration`` to the end of a member's first iteration: keeping its state on the
host and dropping its devices, connecting to the others, loading or compiling the program, restoring the state on the
devices, and running one iteration."""


class RecutFailed(NamedTuple):
    """A member cannot take part in a move of blocks.

    Attributes:
        number: generation with these blocks, which it cannot form, so that it waits for another; or the one that it
            runs, and goes on to run, as it was to load the programs ahead.
        reason: reason, in a few words.
    """

    member: Member
    number: int
    reason: str
    time: float


class Loaded(NamedTuple):
    """A member has loaded the programs that were to be loaded ahead; or cannot, and will as it forms the generation.

    Attributes:
        number: generation that it runs meanwhile.
    """

    member: Member
    number: int
    time: float


class Done(NamedTuple):
    """A member has run all its iterations of this generation."""

    member: Member
    number: int
    time: float


class FaultInjected(NamedTuple):
    """A fault was injected into a process: its death does not count towards the limit of restarts."""

    member: Member
    time: float


class ClockJumped(NamedTuple):
    """The supervisor was suspended, and has not yet read the messages sent meanwhile."""

    time: float


class CheckpointsListed(NamedTuple):
    """The checkpoints that exist when a generation goes live.

    Attributes:
        newest: iteration of the newest checkpoint; None: there is none.
        is_full: whether it is sound and holds the state of every expert after that iteration.
        is_busy: whether a save or a load is still in progress.
        written: last iteration whose record is written.
    """

    time: float
    newest: int | None = None
    is_full: bool = False
    is_busy: bool = False
    written: int = 0


class Restored(NamedTuple):
    """The state for a generation, loaded from a checkpoint or resharded, is among every member's snapshots.

    Attributes:
        stamp: stamp of the state, with the generation that waits for it.
        written: last iteration whose record is written.
    """

    stamp: StateId
    time: float
    written: int = 0


class RestoreFailed(NamedTuple):
    """A state could be neither loaded nor resharded.

    Attributes:
        number: generation that waits for it.
        reason: what is lost.
        remedy: what the user can do; None: resume from the newest checkpoint.
    """

    number: int
    time: float
    reason: str
    remedy: str | None = None


class RecutReady(NamedTuple):
    """The survivors of some failures would be faster with other blocks, and the programs for that are prepared.

    Attributes:
        failed: workers that are down.
        cut: workers that hold each block.
        gain: share of the planned time of a re-routed iteration that it saves.
        most_bytes: bytes of state that the worker that gets the most of them has to copy.
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
        away: seconds since the node of a process was lost, by process, for lost nodes only.
        held_down: processes that fault injection keeps down for now.
    """

    time: float
    away: Mapping[Process, float] = field(default_factory=dict)
    held_down: frozenset[Process] = frozenset()


class StopRequested(NamedTuple):
    """The run is to stop after an iteration that its members finish: nobody else is admitted, and no blocks move."""

    time: float


class Tick(NamedTuple):
    """Everything observed so far has been reported: decide now."""

    time: float


Message = Ready | Departed | Formed | Heartbeat | PhaseTimed | RecutFailed | Loaded | Done
"""Events that processes send; the supervisor observes the others."""
Event = (Started | Died | FaultInjected | Message | ClockJumped | Tick) | (
    CheckpointsListed | Restored | RestoreFailed | RecutReady | MayRestart | StopRequested
)
