"""Everything that is known of a run at one moment, on which the failure detector and the state machine decide.

``RunStatus`` has a ``ProcessStatus`` for every process, and the newest ``Generation``, from the command that forms it
to the last iteration of its members. ``RecoveryPolicy`` has the settings of recovery, and ``BlockMoves`` the blocks
that survivors of a failure take over: the cuts that were found and used, and whether a move pays.

``Membership`` adds the changes to it, see ``swift.elastic.membership.state_machine``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, Self

from swift.deadlines import Deadlines
from swift.elastic.membership.messages import (
    ActivateGeneration,
    Died,
    FormGeneration,
    FoundSlices,
    Member,
    PreloadPrograms,
    Process,
    RecutReady,
    ReshardState,
    RestoreState,
    ShardLayout,
    StateId,
    complete_workers,
    lost_stages,
)
from swift.schedules.adapt.moves import MigrationPolicy
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.topology import Worker

Recovery = Literal["live", "restart"]


class ProcessState(StrEnum):
    """State of a process, as far as the supervisor knows."""

    DEAD = "dead"
    STARTING = "starting"
    WAITING = "waiting"
    FORMING = "forming"
    LIVE = "live"
    RETIRED = "retired"


@dataclass(frozen=True)
class ProcessStatus:
    """Status of a process.

    Attributes:
        member: its newest incarnation; -1 if it was never started.
        state: state of this incarnation.
        seen: when it was started or last sent a message, in seconds.
        is_dying: whether it is being killed.
        killed: when it was killed, in seconds.
        is_excused: whether it is killed together with all others, through no fault of its own.
        has_injected_fault: whether a fault was injected into this incarnation.
        last_live: newest generation in which it was live; 0: none.
        last_worked: newest generation in which it has finished an iteration; 0: none.
        deaths: number of its deaths that count towards the limit of restarts.
        quick_deaths: number of consecutive incarnations, up to the last that died, that failed at their start.
        entered: newest iteration that it has begun in the newest live generation; 0: none yet.
        finished: newest iteration that it has finished there.
    """

    member: Member
    state: ProcessState = ProcessState.DEAD
    seen: float = 0.0
    is_dying: bool = False
    killed: float = 0.0
    is_excused: bool = False
    has_injected_fault: bool = False
    last_live: int = 0
    last_worked: int = 0
    deaths: int = 0
    quick_deaths: int = 0
    entered: int = 0
    finished: int = 0

    @property
    def is_present(self) -> bool:
        """Returns whether it can be a member of the next generation."""
        return self.is_alive and self.state is not ProcessState.STARTING and not self.is_dying

    @property
    def is_alive(self) -> bool:
        """Returns whether it may still send messages: it is neither dead nor retired."""
        return self.state not in (ProcessState.DEAD, ProcessState.RETIRED)


@dataclass(frozen=True)
class Generation:
    """The newest generation.

    Attributes:
        form: command that began it.
        since: time of its last progress, in seconds: it began or went live, a member was connected, or running members
            finished an iteration.
        departed: members that have left the generation before.
        waiting_since: when the first of them had left it, in seconds; None: none has.
        linked: members that are connected to all the others.
        member_states: states that each formed member has.
        known_slices: slices that these members know to be kept elsewhere than by their owner.
        go: command that made it live; None before.
        restoring: command for the state that its members wait for; None: they wait for none.
        base: iteration after which its members run; None before they do.
        done: members that have run all their iterations.
        ahead: command to load the programs of the next one while it runs; None: there was none.
        loaded: members that have done so.
    """

    form: FormGeneration
    since: float
    departed: frozenset[Member] = frozenset()
    waiting_since: float | None = None
    linked: frozenset[Member] = frozenset()
    member_states: Mapping[Member, frozenset[StateId]] = field(default_factory=dict)
    known_slices: FoundSlices = frozenset()
    go: ActivateGeneration | None = None
    restoring: RestoreState | ReshardState | None = None
    base: int | None = None
    done: frozenset[Member] = frozenset()
    ahead: PreloadPrograms | None = None
    loaded: frozenset[Member] = frozenset()

    @property
    def is_live(self) -> bool:
        """Returns whether all members have formed it."""
        return self.go is not None

    @property
    def not_formed(self) -> tuple[Member, ...]:
        """Members that have not formed it yet."""
        return tuple(member for member in self.form.members if member not in self.member_states)

    @property
    def not_departed(self) -> tuple[Member, ...]:
        """Members that have not left the generation before."""
        return tuple(member for member in self.form.members if member not in self.departed)

    @property
    def is_done(self) -> bool:
        """Returns whether all members have run all their iterations."""
        return self.is_live and set(self.form.members) <= self.done


@dataclass(frozen=True)
class BlockMoves:
    """The moves of blocks in a run.

    Attributes:
        rule: whether a move pays; None: blocks stay.
        prepared: cut that is prepared and was not used yet; None: there is none.
        used: the one that was used last, for failures that have not changed since; it is used once.
        cuts: workers that hold each block, by number of the generation, for those that ran with another cut.
    """

    rule: MigrationPolicy | None = None
    prepared: RecutReady | None = None
    used: RecutReady | None = None
    cuts: Mapping[int, ChunkAssignment] = field(default_factory=dict)

    def with_prepared(self, recut: RecutReady) -> "BlockMoves":
        """Returns the moves with a cut that is prepared; one that was used already is ignored."""
        is_used = self.used is not None and self.used.failed == recut.failed
        return self if self.rule is None or is_used else replace(self, prepared=recut)

    def better(self, failed: frozenset[Worker]) -> RecutReady | None:
        """Returns the cut to use now that these workers are down; None if there is none, or its move does not pay."""
        recut = self.prepared
        if self.rule is None or recut is None or recut.failed != failed:
            return None
        return recut if self.rule.is_worth(recut.gain, recut.most_bytes) else None

    def after_form(
        self, number: int, failed: frozenset[Worker], time: float, better: RecutReady | None
    ) -> "BlockMoves":
        """Returns the moves once a generation is to form while these workers are down.

        Args:
            number: number of the generation.
            failed: workers that are down.
            time: present time, in seconds.
            better: cut that it is to use; None: that of the run.
        """
        if self.rule is None:
            return self
        rule = self.rule.after(failed, time)
        if better is not None:
            return replace(self, rule=rule, prepared=None, used=better, cuts={**self.cuts, number: better.cut})
        is_as_before = self.used is not None and self.used.failed == failed
        return replace(self, rule=rule, used=self.used if is_as_before else None)

    def after_refusal(self) -> "BlockMoves":
        """Returns the moves once a process cannot take part in one: there are no more, as it could not in others."""
        return replace(self, rule=None, prepared=None)

    def after_move(self, seconds: float) -> "BlockMoves":
        """Returns the moves once blocks have been moved, for which training has waited this long so far."""
        if self.rule is None or self.used is None:
            return self
        slower = self.rule.after_move(self.used.most_bytes, seconds)
        return replace(self, rule=slower)


@dataclass(frozen=True)
class RecoveryPolicy:
    """Settings of recovery from failures.

    Attributes:
        recovery: ``live``: survivors keep running in their processes; ``restart``: they are restarted, too.
        max_restarts: number of times that a process is restarted, not counting deaths by fault injection.
        begins_with_state: whether the run begins with a state that is loaded: its newest checkpoint's, or one with the
            weights of another run.
        is_elastic: whether any processes can run without the others, see ``swift.elastic.membership.state_machine``.
        own_cut: workers that hold each chunk as the run is cut; False where a chunk is a stage.
        move_rule: whether survivors take over blocks; None: they never do.
        memory_checkpoint_every: iterations between the copies that restarted processes find; 0: they find what their
            peers keep.
        joins_once: whether a process joins one generation only, as on accelerators: all are restarted for the next one.
        needs_all: whether no generation can form without all processes, as on the hosts of a TPU slice.
    """

    recovery: Recovery = "live"
    max_restarts: int = 10
    begins_with_state: bool = False
    is_elastic: bool = False
    own_cut: ChunkAssignment = DEFAULT_ASSIGNMENT
    move_rule: MigrationPolicy | None = None
    memory_checkpoint_every: int = 0
    joins_once: bool = False
    needs_all: bool = False


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, from which ``Membership`` decides.

    Attributes:
        processes: all processes of the run.
        deadlines: time limits.
        statuses: status of every process.
        since: when the run began, or when its last generation ended because a stage was lost, in seconds.
        policy: settings of recovery.
        generation: newest generation; None at the beginning, and while a stage has no process.
        number: number of the newest generation ever formed.
        last_live: number of the newest generation that was ever live.
        last_worked: number of the newest generation in which any process has finished an iteration; 0: none.
        stalled: generations of the same processes, one after the other, that ended without an iteration though none of
            these alone had failed, the newest last.
        failed: deaths since one of a process at its start, for which all are to be restarted; see
            ``swift.elastic.membership.state_machine``.
        lost: stages reported as lost since the last generation.
        retried: newest generation that was formed because the one before made no progress; 0: none.
        paused_until: time before which nothing is decided, as messages may still be unread.
        layouts: layouts of the states of an elastic run, the newest last.
        moves: blocks that survivors may take over, or have taken over.
        is_stopping: whether the run is to stop, see ``StopRequested``.
    """

    processes: tuple[Process, ...]
    deadlines: Deadlines
    statuses: Mapping[Process, ProcessStatus]
    since: float
    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    generation: Generation | None = None
    number: int = 0
    last_live: int = 0
    last_worked: int = 0
    stalled: tuple[Generation, ...] = ()
    failed: tuple[Died, ...] = ()
    lost: tuple[int, ...] = ()
    retried: int = 0
    paused_until: float = -float("inf")
    layouts: tuple[ShardLayout, ...] = ()
    moves: BlockMoves = field(default_factory=BlockMoves)
    is_stopping: bool = False

    def present(self) -> tuple[Member, ...]:
        """Members that a new generation would have: the ready processes of complete workers.

        In an elastic run, all ready processes. In one that is to stop, no others than the members of the newest.
        """
        ready = [process for process, status in self.statuses.items() if status.is_present]
        if self.is_stopping and self.generation is not None:
            ready = [process for process in ready if self.statuses[process].member in self.generation.form.members]
        if self.policy.is_elastic:
            return tuple(self.statuses[process].member for process in sorted(ready))
        complete = complete_workers(self.processes, ready)
        return tuple(self.statuses[process].member for process in sorted(ready) if process.worker in complete)

    @property
    def failed_workers(self) -> frozenset[Worker]:
        """Workers that cannot be in a new generation."""
        present = {member.process.worker for member in self.present()}
        return frozenset(process.worker for process in self.processes) - present

    @property
    def unserved_stages(self) -> tuple[int, ...]:
        """Stages that keep a new generation from forming: no worker of theirs is there, see ``lost_stages``."""
        return self._lost([member.process for member in self.present()])

    def lost_without(self, processes: Collection[Process]) -> tuple[int, ...]:
        """Stages that no process would serve without these."""
        return self._lost([process for process in self.processes if process not in processes])

    def _lost(self, present: Collection[Process]) -> tuple[int, ...]:
        if self.policy.needs_all:
            return tuple(sorted({process.worker[1] for process in self.processes if process not in present}))
        is_elastic, holders = self.policy.is_elastic, self.policy.own_cut
        return lost_stages(self.processes, present, is_elastic=is_elastic, own_cut=holders)

    def cut_of(self, number: int) -> ChunkAssignment:
        """Returns the workers that hold each chunk in a generation."""
        return self.moves.cuts.get(number, self.policy.own_cut)

    @property
    def dead(self) -> tuple[Process, ...]:
        """Processes whose newest incarnation is dead or retired."""
        return tuple(process for process, status in self.statuses.items() if not status.is_alive)

    def has_exhausted_restarts(self, process: Process) -> bool:
        """Returns whether a process must not be restarted."""
        status = self.statuses[process]
        if status.state is ProcessState.RETIRED or status.deaths > self.policy.max_restarts:
            return True
        return status.quick_deaths >= self.deadlines.max_quick_deaths

    def is_assembled(self, time: float) -> bool:
        """Returns whether a first generation, or one after a lost stage, need not wait for starting processes."""
        if time - self.since > self.deadlines.start:
            return True
        states = {status.state for process, status in self.statuses.items() if not self.has_exhausted_restarts(process)}
        return ProcessState.STARTING not in states if self.number else states == {ProcessState.WAITING}

    @property
    def is_done(self) -> bool:
        """Returns whether all members of the newest generation have run all their iterations."""
        return self.generation is not None and self.generation.is_done

    @property
    def is_loading(self) -> bool:
        """Returns whether the newest generation waits for a checkpoint to be loaded."""
        return self.generation is not None and isinstance(self.generation.restoring, RestoreState)

    def awaits_state(self, number: int) -> bool:
        """Returns whether a generation is the newest, and waits for a state to be loaded or resharded."""
        restoring = self.generation.restoring if self.generation else None
        return restoring is not None and restoring.number == number

    @property
    def is_waiting(self) -> bool:
        """Returns whether the newest generation waits for something other than its members."""
        return self.generation is not None and (self.generation.restoring is not None or self.generation.is_done)

    @property
    def is_recovering(self) -> bool:
        """Returns whether members form a generation, or have not all finished an iteration of it yet."""
        generation = self.generation
        if generation is None or generation.restoring is not None:
            return False
        base = generation.base
        return base is None or any(status.finished <= base for status in self.members_of(generation))

    def members_of(self, generation: Generation) -> tuple[ProcessStatus, ...]:
        """Status of each member's process."""
        return tuple(self.statuses[process] for process, _ in generation.form.members)

    def is_broken(self, generation: Generation) -> bool:
        """Returns whether a member has died, or could not continue."""
        return any(
            status.member != member or status.state not in (ProcessState.FORMING, ProcessState.LIVE)
            for status, member in zip(self.members_of(generation), generation.form.members, strict=True)
        )

    def is_finishing_previous(self, generation: Generation) -> bool:
        """Returns whether members still run the generation before, up to the iteration after which they leave it."""
        running = (self.statuses[process].last_live == self.last_live for process, _ in generation.not_departed)
        return generation.form.after is not None and any(running)

    def with_statuses(self, *statuses: ProcessStatus) -> Self:
        """Returns the same run with these statuses in place of earlier ones of their processes."""
        return replace(self, statuses={**self.statuses, **{status.member.process: status for status in statuses}})
