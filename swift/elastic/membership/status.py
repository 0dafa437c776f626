"""The status of a run: all data from which the failure detector and the state machine decide.

``RunStatus`` has a ``ProcessStatus`` for every process, and the newest ``Generation``, from the command that forms it
to the last iteration of its members. ``RecoveryPolicy`` has the recovery settings. ``BlockMoves`` tracks the blocks
that survivors of a failure take over: the cuts that were found and used, and whether a move pays.

The classes here are immutable and have no transitions between generations. ``Membership``, a subclass of ``RunStatus``,
adds them, see ``swift.elastic.membership.state_machine``.
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
    """State of a process as the supervisor knows it; ``RETIRED`` is dead for all purposes, and never restarted."""

    DEAD = "dead"
    STARTING = "starting"
    WAITING = "waiting"
    FORMING = "forming"
    LIVE = "live"
    RETIRED = "retired"


@dataclass(frozen=True)
class ProcessStatus:
    """Status of a process and its newest incarnation.

    Attributes:
        member: newest incarnation; number -1 if the process was never started.
        state: state of this incarnation.
        seen: when the process was started or last sent a message, in seconds.
        is_dying: whether the process was sent SIGKILL and is not yet known to be dead.
        killed: when the process was sent SIGKILL, in seconds.
        is_excused: whether the process is killed together with all others, through no fault of its own.
        has_injected_fault: whether a fault was injected into this incarnation.
        last_live: newest generation in which this incarnation was live; 0 if none.
        last_worked: newest generation in which this incarnation has finished an iteration; 0 if none.
        deaths: number of deaths that count towards the restart limit.
        quick_deaths: number of consecutive incarnations, ending with the last one that died, that failed at their
            start.
        entered: newest iteration that was begun in the newest live generation; 0 if none yet.
        finished: newest iteration that was finished in that generation; 0 if none yet.
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
        """Whether the process can be a member of the next generation."""
        return self.is_alive and self.state is not ProcessState.STARTING and not self.is_dying

    @property
    def is_alive(self) -> bool:
        """Whether the process may still send messages: it is neither dead nor retired."""
        return self.state not in (ProcessState.DEAD, ProcessState.RETIRED)


@dataclass(frozen=True)
class Generation:
    """The newest generation, from the command that forms it to the last iteration of its members.

    Attributes:
        form: command that formed the generation.
        since: time of the last progress, in seconds: the generation began or went live, a member left the old one or
            connected, or running members finished an iteration. Deadlines count from here.
        departed: members that have left the old generation.
        waiting_since: when the first member had left the old generation, in seconds; None if none has.
        linked: members that are connected to all the others.
        member_states: for each member that has formed the generation, the states that it has.
        known_slices: copies of other processes' slices that these members know of.
        go: command that made the generation live; None until then.
        restoring: command that loads or reshards the state that members wait for; None if they do not wait.
        base: iteration that the generation resumes from; None until its members run.
        done: members that have run all their iterations.
        ahead: command to preload the programs of the next generation; None if there was none.
        loaded: members that have preloaded these programs.
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
        """Whether the generation has gone live, which it does once all members have formed it."""
        return self.go is not None

    @property
    def not_formed(self) -> tuple[Member, ...]:
        """Members that have not formed the generation yet."""
        return tuple(member for member in self.form.members if member not in self.member_states)

    @property
    def not_departed(self) -> tuple[Member, ...]:
        """Members that have not left the old generation yet."""
        return tuple(member for member in self.form.members if member not in self.departed)

    @property
    def is_done(self) -> bool:
        """Whether all members have run all their iterations."""
        return self.is_live and set(self.form.members) <= self.done


@dataclass(frozen=True)
class BlockMoves:
    """Tracks moves of blocks to survivors: the cuts that were found and used, and whether a move pays.

    Attributes:
        rule: decides whether a move pays; None if blocks never move.
        prepared: cut whose programs are compiled and that has not been used yet; None if there is none.
        used: cut that was used last, remembered while the same workers are down so that it is used only once.
        cuts: workers that hold each block, for every generation that uses a cut other than the run's own.
    """

    rule: MigrationPolicy | None = None
    prepared: RecutReady | None = None
    used: RecutReady | None = None
    cuts: Mapping[int, ChunkAssignment] = field(default_factory=dict)

    def with_prepared(self, recut: RecutReady) -> "BlockMoves":
        """Records a prepared cut, unless one was already used for the same failures."""
        is_used = self.used is not None and self.used.failed == recut.failed
        return self if self.rule is None or is_used else replace(self, prepared=recut)

    def better(self, failed: frozenset[Worker]) -> RecutReady | None:
        """Returns the prepared cut for these failed workers, or None if there is none or the move does not pay."""
        recut = self.prepared
        if self.rule is None or recut is None or recut.failed != failed:
            return None
        return recut if self.rule.is_worth(recut.gain, recut.most_bytes) else None

    def after_form(
        self, number: int, failed: frozenset[Worker], time: float, better: RecutReady | None
    ) -> "BlockMoves":
        """Records that a generation forms while these workers are down.

        Args:
            number: number of the generation.
            failed: workers that are down.
            time: present time, in seconds.
            better: cut that the generation will use; None for the run's own cut.
        """
        if self.rule is None:
            return self
        rule = self.rule.after(failed, time)
        if better is not None:
            return replace(self, rule=rule, prepared=None, used=better, cuts={**self.cuts, number: better.cut})
        is_as_before = self.used is not None and self.used.failed == failed
        return replace(self, rule=rule, used=self.used if is_as_before else None)

    def after_refusal(self) -> "BlockMoves":
        """Disables moves after a process could not take part in one, since it could not take part in others either."""
        return replace(self, rule=None, prepared=None)

    def after_move(self, seconds: float) -> "BlockMoves":
        """Records how long training waited for the last move, in seconds, to estimate the cost of later moves."""
        if self.rule is None or self.used is None:
            return self
        slower = self.rule.after_move(self.used.most_bytes, seconds)
        return replace(self, rule=slower)


@dataclass(frozen=True)
class RecoveryPolicy:
    """Settings of recovery from failures.

    Attributes:
        recovery: ``live``: survivors keep running in their processes; ``restart``: they are restarted, too.
        max_restarts: maximum number of restarts per process; deaths through no fault of the process, such as injected
            ones, do not count.
        begins_with_state: whether the run begins with a loaded state: its own newest checkpoint, or the weights of
            another run.
        is_elastic: whether any subset of the processes can run, see ``swift.elastic.membership.state_machine``.
        own_cut: workers that hold each chunk in the run's own cut; falsy if each stage is one chunk.
        move_rule: decides whether survivors take over blocks; None if they never do.
        memory_checkpoint_every: iterations between the copies of its state that a restarted process finds in shared
            memory; 0 for no such copies, so that a restarted process gets the state from its peers.
        joins_once: whether a process can join only one generation, as on accelerators; for the next generation, all
            processes are then restarted.
        needs_all: whether a generation needs all processes, as on the hosts of a TPU slice.
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
        policy: recovery settings.
        generation: newest generation; None at the beginning, and while a stage has no process.
        number: number of the newest generation that was formed.
        last_live: number of the newest generation that was live.
        last_worked: number of the newest generation in which any process has finished an iteration; 0 if none.
        stalled: consecutive generations of the same processes that ended without finishing an iteration and without a
            single process to blame, the newest last.
        failed: deaths since a process failed at its start, as long as no process has been blamed for them; only with
            ``--recovery restart``, see ``swift.elastic.membership.state_machine``.
        lost: stages reported as lost since the last generation.
        retried: newest generation that was formed because the previous one made no progress; 0 if none.
        paused_until: time before which nothing is decided, because messages may still be unread.
        layouts: state layouts of an elastic run, the newest last.
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
        """Returns the members that a new generation would have: the ready processes of complete workers.

        In an elastic run these are all ready processes. If the run is to stop, only members of the newest generation
        are eligible.
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
        """Workers that cannot be members of a new generation."""
        present = {member.process.worker for member in self.present()}
        return frozenset(process.worker for process in self.processes) - present

    @property
    def unserved_stages(self) -> tuple[int, ...]:
        """Stages without a worker, which keep a new generation from forming; see ``lost_stages``."""
        return self._lost([member.process for member in self.present()])

    def lost_without(self, processes: Collection[Process]) -> tuple[int, ...]:
        """Returns the stages that would be lost without these processes."""
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
        """Returns whether a process must not be restarted: it is retired, or has died too often."""
        status = self.statuses[process]
        if status.state is ProcessState.RETIRED or status.deaths > self.policy.max_restarts:
            return True
        return status.quick_deaths >= self.deadlines.max_quick_deaths

    def is_assembled(self, time: float) -> bool:
        """Returns whether the first generation, or the first after a stage was lost, can form without more processes.

        It waits for starting processes, but no longer than ``Deadlines.start``.
        """
        if time - self.since > self.deadlines.start:
            return True
        states = {status.state for process, status in self.statuses.items() if not self.has_exhausted_restarts(process)}
        return ProcessState.STARTING not in states if self.number else states == {ProcessState.WAITING}

    @property
    def is_done(self) -> bool:
        """Whether all members of the newest generation have run all their iterations."""
        return self.generation is not None and self.generation.is_done

    @property
    def has_lost_stages(self) -> bool:
        """Whether the run waits for processes of a stage that no process serves.

        Waiting can save the state: a process that could not leave its generation in time has stored its part for its
        next incarnation.
        """
        return self.generation is None and self.policy.recovery == "live" and bool(self.lost)

    @property
    def is_loading(self) -> bool:
        """Whether the newest generation waits for a checkpoint to be loaded."""
        return self.generation is not None and isinstance(self.generation.restoring, RestoreState)

    def awaits_state(self, number: int) -> bool:
        """Returns whether generation ``number`` is the newest and waits for a state to be loaded or resharded."""
        restoring = self.generation.restoring if self.generation else None
        return restoring is not None and restoring.number == number

    @property
    def is_waiting(self) -> bool:
        """Whether the newest generation waits for a state to be loaded or resharded, or has run all its iterations."""
        return self.generation is not None and (self.generation.restoring is not None or self.generation.is_done)

    @property
    def is_recovering(self) -> bool:
        """Whether a generation is forming, or not all of its members have finished an iteration yet."""
        generation = self.generation
        if generation is None or generation.restoring is not None:
            return False
        base = generation.base
        return base is None or any(status.finished <= base for status in self.members_of(generation))

    def members_of(self, generation: Generation) -> tuple[ProcessStatus, ...]:
        """Returns the status of each member's process."""
        return tuple(self.statuses[process] for process, _ in generation.form.members)

    def is_broken(self, generation: Generation) -> bool:
        """Returns whether a member has died, or could not continue."""
        return any(
            status.member != member or status.state not in (ProcessState.FORMING, ProcessState.LIVE)
            for status, member in zip(self.members_of(generation), generation.form.members, strict=True)
        )

    def is_finishing_previous(self, generation: Generation) -> bool:
        """Returns whether members still run the previous generation, up to the iteration after which they leave."""
        running = (self.statuses[process].last_live == self.last_live for process, _ in generation.not_departed)
        return generation.form.after is not None and any(running)

    def with_statuses(self, *statuses: ProcessStatus) -> Self:
        """Returns the run's status with the statuses of these processes replaced."""
        return replace(self, statuses={**self.statuses, **{status.member.process: status for status in statuses}})
