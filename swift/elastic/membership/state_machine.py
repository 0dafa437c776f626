"""The state machine that decides on a run's generations and on its recovery from failures.

The supervisor outlives the workers, so they need no agreement among themselves: it decides, and workers obey. It
reports everything that it observes to ``Membership.on``, then a ``Tick``, and carries out the returned commands in
order. Only a ``Tick`` changes the generation: deaths reported before the same ``Tick`` cost one generation together,
and a heartbeat that waited in a queue still counts.

A generation forms in two rounds. ``FormGeneration`` takes every member out of the generation before; when all have
answered, ``ActivateGeneration`` makes it live, and ``StartGeneration`` lets the members run once the state to resume
from is available. A process that may still be running is never left out of a generation: it is killed, and the
generation waits for its death.

When a member is lost, the others continue re-routed. Once a better cut is prepared for them, and moving pays, they
load its programs while they run, and then form a generation with it, in which they keep their connections and devices.
Every other generation has the cuts of the run, so that blocks move back when anything changes.

Where all are restarted after a death (``--recovery restart``), a process that fails at its start again and again is
left out, and the others continue without it. Where several fail at the same time, they may have a cause in common, and
none is to blame. Restarts that bring no progress have a limit, too.

With one pipeline of one stage and a process for each expert rank, no other process has a rank's slices. Such a run is
elastic: the ranks that are present continue without lost ones, from a state that is resharded for them. ``_Slices``
chooses that state.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from swift.deadlines import Deadlines
from swift.elastic.membership.failure_detector import Stall, overdue, unformed, unkillable
from swift.elastic.membership.messages import (
    AbortRun,
    ActivateGeneration,
    CheckpointsListed,
    ClockJumped,
    Commands,
    Connect,
    Departed,
    Died,
    Done,
    Event,
    ExcludeProcess,
    FaultInjected,
    Formed,
    FormGeneration,
    FoundSlices,
    Heartbeat,
    Kill,
    Loaded,
    MayRestart,
    Member,
    Message,
    PhaseTimed,
    PreloadPrograms,
    Process,
    Ready,
    RecutFailed,
    RecutReady,
    ReshardState,
    RestartAll,
    Restored,
    RestoreFailed,
    RestoreState,
    Retire,
    ShardLayout,
    StageLost,
    Started,
    StartGeneration,
    StartProcess,
    StateId,
    StopRequested,
    StopRun,
    Tick,
    newest_common_state,
)
from swift.elastic.membership.status import (
    BlockMoves,
    Generation,
    ProcessState,
    ProcessStatus,
    RecoveryPolicy,
    RunStatus,
)
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT

_MAX_STALLS = 3
"""Number of generations of the same processes, one after the other, without any iteration; then the run ends."""
_TOGETHER_S = 1.0
"""Seconds after the death of a process at its start in which others that fail, too, have failed at the same time."""
_MAX_RERUN = 2
"""Iterations worth running again to lose no slice: every process keeps the states of its last two only."""


@dataclass(frozen=True)
class Membership(RunStatus):
    """The membership of a run. It is immutable: ``on`` returns the next one."""

    @classmethod
    def of(
        cls, processes: Sequence[Process], deadlines: Deadlines, time: float, policy: RecoveryPolicy | None = None
    ) -> Self:
        """Returns the membership of a run before any of its processes has been started."""
        statuses = {process: ProcessStatus(Member(process, -1)) for process in processes}
        policy = policy or RecoveryPolicy()
        return cls(tuple(processes), deadlines, statuses, time, policy, moves=BlockMoves(policy.move_rule))

    def on(self, event: Event) -> tuple[Self, Commands]:
        """Returns the membership after an event, and the commands to carry out.

        Only a ``Tick`` changes the generation. Other events are recorded; at most they lead to the end of a process
        that should not exist, or of the run.
        """
        match event:
            case Tick(time):
                return self._after_tick(time)
            case Started(member, time):
                return self._after_start(member, time), ()
            case Died():
                return self._on_death(event)
            case FaultInjected(member):
                status = self.statuses[member.process]
                if member != status.member:
                    return self, ()
                return self.with_statuses(replace(status, has_injected_fault=True)), ()
            case ClockJumped(time):
                return replace(self, paused_until=time + self.deadlines.heartbeat), ()
            case CheckpointsListed():
                return self._choose_state(event)
            case Restored():
                return self._after_restore(event)
            case RestoreFailed(number, _, reason, remedy):
                return self, (StopRun(reason, remedy),) if self.awaits_state(number) else ()
            case RecutReady():
                return replace(self, moves=self.moves.with_prepared(event)), ()
            case StopRequested():
                return replace(self, is_stopping=True), ()
            case MayRestart():
                return self, self._restarts(event)
            case _:
                return self._on_message(event)

    def with_clock_reset(self, time: float) -> Self:
        """Returns the membership with ``time`` as that of its generation's last progress: members wait for others."""
        return self if self.generation is None else replace(self, generation=replace(self.generation, since=time))

    def _after_tick(self, time: float) -> tuple[Self, Commands]:
        if time < self.paused_until:
            return self, ()
        # Members that wait for a checkpoint are not late.
        return (self.with_clock_reset(time) if self.is_waiting else self)._decide(time)

    def _decide(self, time: float) -> tuple[Self, Commands]:
        if late := unkillable(self, time):
            return self._retired(late)
        kills = {kill.member: kill for kill in overdue(self, time)}
        if kills:
            return self._killed(kills, time), tuple(kills.values())
        if any(status.is_dying for status in self.statuses.values()):
            return self, ()
        generation = self.generation
        if generation is None:
            return self._form(time) if self.is_assembled(time) else (self, ())
        if self.failed:
            return self._after_failures(generation, time)
        if self.is_broken(generation):
            return self._form_after_break(generation, time)
        return self._decide_live(generation, time) if generation.is_live else self._decide_forming(generation, time)

    def _decide_live(self, generation: Generation, time: float) -> tuple[Self, Commands]:
        """Admits joiners once all members run, so that a series of joiners still leaves a generation time to work.

        If there are none, members take over blocks where that pays.
        """
        entered = [status.entered for status in self.members_of(generation)]
        if time - generation.since > self.deadlines.progress:
            reason = f"no process finished an iteration for {self.deadlines.progress:g} s, and all are in {entered[0]}"
            stalled, stop = self._after_stall(generation, Stall(reason, "progress"))
            if stop:
                return stalled, stop
            # A hanging process does not leave, which identifies it; the others keep their state.
            if self.retried != generation.form.number and not self.policy.joins_once:
                again, commands = stalled._form(time)
                return replace(again, retried=again.number), commands
            return stalled.restarted(reason, time)
        if self.is_stopping:
            return self, ()
        if min(entered) > 0 and (joiners := set(self.present()) - set(generation.form.members)):
            joined = ", ".join(sorted(str(member.process) for member in joiners))
            return self._form_next(generation, time, f"{joined} can rejoin", after=max(entered) + 1)
        if min(entered) > 0 and self.moves.prepared is not None and (better := self.moves.better(self.failed_workers)):
            return self._move(generation, time, better, after=max(entered) + 1)
        return self, ()

    def _move(self, live: Generation, time: float, better: RecutReady, after: int) -> tuple[Self, Commands]:
        """Forms a generation with a better cut once its members have loaded the programs, however long that takes."""
        ahead = PreloadPrograms(live.form.number, live.form.members, better.cut)
        if live.ahead != ahead:
            return replace(self, generation=replace(live, ahead=ahead, loaded=frozenset())), (ahead,)
        is_loaded = live.loaded >= set(ahead.members)
        return self._form(time, after=after, better=better) if is_loaded else (self, ())

    def _decide_forming(self, generation: Generation, time: float) -> tuple[Self, Commands]:
        """Aborts members that do not finish the iteration after which they leave, or not together with the others."""
        if not generation.not_formed:
            return self._go_live(generation, time)
        if stall := unformed(self, generation, time):
            return self._restarted_or_ended(generation, stall, time)
        has_left = any(self.statuses[member.process].last_live == self.last_live for member in generation.departed)
        limit_s = self.deadlines.forming if has_left else self.deadlines.progress
        if self.is_finishing_previous(generation) and time - generation.since > limit_s:
            return self._form(time)
        return self, ()

    def _form_after_break(self, generation: Generation, time: float) -> tuple[Self, Commands]:
        reason = "a process could not continue"
        is_any_lost = any(not status.is_alive for status in self.members_of(generation))
        if self.policy.recovery == "live" or is_any_lost:
            return self._form_next(generation, time, reason)
        stalled, stop = self._after_break(generation, reason, time)
        return (stalled, stop) if stop else stalled._form_next(generation, time, reason)

    def _form_next(
        self, generation: Generation, time: float, reason: str, after: int | None = None
    ) -> tuple[Self, Commands]:
        """Forms a generation that follows another one; where processes join only one, all are restarted before.

        That waits until those that are starting are there, and until all members must have a copy of their state. There
        is none for joiners once a member has run all its iterations.
        """
        if not self.policy.joins_once:
            return self._form(time, after=after)
        if after is not None:
            is_starting = any(status.state is ProcessState.STARTING for status in self.statuses.values())
            finished = min(status.finished for status in self.members_of(generation))
            has_copies = finished >= (generation.base or 0) + 2 * self.policy.memory_checkpoint_every
            if is_starting or generation.done or not has_copies:
                return self, ()
        have_joined = [status for status in self.statuses.values() if status.member in generation.form.members]
        return self.restarted(reason, time) if any(status.is_alive for status in have_joined) else self._form(time)

    def _form(self, time: float, after: int | None = None, better: RecutReady | None = None) -> tuple[Self, Commands]:
        """Forms a generation of all that are present, with the cuts of the run unless it is to use a better one."""
        lost = self.unserved_stages
        if lost:
            return self._await_stages(lost, time)
        form = FormGeneration(
            self.number + 1, self.present(), after, DEFAULT_ASSIGNMENT if better is None else better.cut
        )
        statuses = [
            replace(status, state=ProcessState.FORMING if status.member in form.members else ProcessState.WAITING)
            for status in self.statuses.values()
            if status.is_present
        ]
        formed = replace(self.with_statuses(*statuses), generation=Generation(form, time), number=form.number, lost=())
        return replace(formed, moves=self.moves.after_form(form.number, self.failed_workers, time, better)), (form,)

    def _await_stages(self, lost: tuple[int, ...], time: float) -> tuple[Self, Commands]:
        """Waits for joiners. No member leaves its generation: without the stage it finishes no iteration anyway."""
        is_new = not set(lost) <= set(self.lost)
        since = self.since if self.generation is None else time
        statuses = [
            replace(status, state=ProcessState.WAITING) for status in self.statuses.values() if status.is_present
        ]
        waiting = replace(self.with_statuses(*statuses), generation=None, since=since, lost=lost)
        return waiting, (StageLost(lost),) if is_new else ()

    def _go_live(self, generation: Generation, time: float) -> tuple[Self, Commands]:
        """Makes a generation live, from the newest state of which every stage has a complete worker.

        A restarted process may hold only an older state than the others.
        """
        number, members = generation.form.number, generation.form.members
        held_by = {member.process: states for member, states in generation.member_states.items()}
        layouts = self.layouts
        if self.policy.is_elastic:
            slices = _Slices(layouts, held_by, generation.known_slices)
            go, layouts = _elastic_go_live(number, members, slices)
        else:
            stamp = newest_common_state(self.processes, held_by, self.cut_of)
            holders = tuple(member for member in members if stamp in generation.member_states[member])
            go = ActivateGeneration(
                number,
                stamp,
                holders,
                cut=self.moves.cuts.get(stamp.generation, DEFAULT_ASSIGNMENT) if stamp else DEFAULT_ASSIGNMENT,
            )
        live = [
            replace(self.statuses[process], state=ProcessState.LIVE, last_live=number, entered=0, finished=0)
            for process, _ in members
        ]
        generation = replace(generation, since=time, go=go)
        return replace(self.with_statuses(*live), generation=generation, last_live=number, layouts=layouts), (go,)

    def _choose_state(self, listed: CheckpointsListed) -> tuple[Self, Commands]:
        """Starts a live generation from the newest state that there is: its members', or that of a checkpoint."""
        generation = self.generation
        if generation is None or generation.go is None or generation.restoring or generation.base is not None:
            return self, ()
        go, newest = generation.go, listed.newest
        if go.stamp is None:
            is_lost = listed.written > 0 or self.policy.begins_with_state
            if is_lost and newest is None and not listed.is_busy:
                return self, (StopRun("no process is left that has the state of some stage"),)
            is_better = is_lost
        else:  # a newer checkpoint is better where either of the two states is incomplete
            is_better = newest is not None and newest > go.stamp.step and (listed.is_full or not go.is_whole)
        restoring: RestoreState | ReshardState
        if generation.form.cut and (is_better or go.stamp is None):
            return self._form(listed.time)  # all go back with the cuts of the run, as checkpoints have them
        if is_better:
            restoring = RestoreState(go.number)
        elif go.stamp is not None and go.layout is not None:
            restoring = ReshardState(go.number, go.stamp, go.layout)
        else:
            return self._run(generation, StartGeneration(go, listed.written), listed.time)
        return replace(self, generation=replace(generation, restoring=restoring)), (restoring,)

    def _after_restore(self, restored: Restored) -> tuple[Self, Commands]:
        generation, (stamp, time, written) = self.generation, restored
        if generation is None or generation.go is None or not self.awaits_state(stamp.generation):
            return self, ()
        holders = generation.go.holders if isinstance(generation.restoring, ReshardState) else ()
        start = StartGeneration(ActivateGeneration(stamp.generation, stamp, holders), written, is_restored=True)
        return self._run(generation, start, time)

    def _run(self, generation: Generation, start: StartGeneration, time: float) -> tuple[Self, Commands]:
        base = start.go.stamp.step if start.go.stamp else 0
        return replace(self, generation=replace(generation, since=time, restoring=None, base=base)), (start,)

    def _after_start(self, member: Member, time: float) -> Self:
        """Returns the membership once a new incarnation of a dead process has been started."""
        last = self.statuses[member.process]
        assert last.state is ProcessState.DEAD, f"{member.process} is started while it is alive"
        assert member.incarnation > last.member.incarnation, "an incarnation is reused"
        status = ProcessStatus(member, ProcessState.STARTING, time, deaths=last.deaths, quick_deaths=last.quick_deaths)
        return self.with_statuses(status)

    def _on_death(self, death: Died) -> tuple[Self, Commands]:
        """Returns the membership after a death, and the commands that follow at once."""
        member, status = death.member, self.statuses[death.member.process]
        if member != status.member or not status.is_alive:
            return self, ()
        # A process that is killed together with all others or on purpose, or dies with its node, is not to blame.
        is_to_blame = death.is_own and not status.is_excused and not status.has_injected_fault
        is_quick = not self._has_started(status)
        fresh = replace(status, state=ProcessState.DEAD, is_dying=False, is_excused=False)
        dead = self.with_statuses(fresh if is_quick else replace(fresh, quick_deaths=0))
        restarts_all = self.policy.recovery == "restart" and not status.is_excused and self.generation is not None
        if restarts_all and (self.failed or (is_to_blame and is_quick)):
            return replace(dead, failed=(*self.failed, death)), ()
        blamed, commands = dead._count_failure(death, is_quick=is_quick) if is_to_blame else (dead, ())
        if restarts_all:
            killing, restart_all = blamed.restarted(f"{member.process} died", death.time)
            return killing, commands + restart_all
        return blamed, commands

    def _after_failures(self, generation: Generation, time: float) -> tuple[Self, Commands]:
        """Returns the membership once it is known who has failed together with a process that failed at its start.

        One that fails alone is to blame. If several do, the cause may be what they have in common, as a network or a
        program that needs too much memory: without any of them the others would fail, too.
        """
        first, *other_deaths = self.failed
        if time - first.time <= _TOGETHER_S:
            return self, ()
        known: Self = replace(self, failed=())
        if other_deaths:
            names = ", ".join(sorted(str(death.member.process) for death in self.failed))
            return known._restarted_or_ended(generation, Stall(f"{names} died at the same time"), time)
        blamed, commands = known._count_failure(first, is_quick=True)
        if any(isinstance(command, AbortRun) for command in commands):
            return blamed, commands
        killing, restart_all = blamed.restarted(f"{first.member.process} died", time)
        return killing, commands + restart_all

    def _count_failure(self, death: Died, *, is_quick: bool) -> tuple[Self, Commands]:
        """Returns the membership in which a death counts, and the report of a process that is restarted no more."""
        process = death.member.process
        status = self.statuses[process]
        quick_deaths = status.quick_deaths + is_quick
        dead = self.with_statuses(replace(status, deaths=status.deaths + 1, quick_deaths=quick_deaths))
        if quick_deaths < self.deadlines.max_quick_deaths:
            return dead, ()
        start = "was live" if self.policy.recovery == "live" else "had finished an iteration"
        reason = f"died {quick_deaths} times in a row before it {start}: {death.reason}"
        return dead, (ExcludeProcess(process, reason) if dead._fails_alone(process) else AbortRun(process, reason),)

    def _has_started(self, status: ProcessStatus) -> bool:
        """Returns whether an incarnation has got beyond its start.

        Survivors that keep running are not held up by one that fails later. Where all are restarted with it, it has to
        finish an iteration: a device may be found broken by the first computation.
        """
        return bool(status.last_live if self.policy.recovery == "live" else status.last_worked)

    def _fails_alone(self, process: Process) -> bool:
        """Returns whether the others can continue without a process that fails at its start, and do not fail, too.

        Until any generation has finished an iteration, what fails in one process may fail in all.
        """
        if self.policy.recovery == "live" or self.lost_without(
            [candidate for candidate in self.processes if self.has_exhausted_restarts(candidate)]
        ):
            return False
        quick_deaths = sum(status.quick_deaths for other, status in self.statuses.items() if other != process)
        return self.last_worked > 0 or quick_deaths < self.deadlines.max_quick_deaths

    def _after_stall(self, generation: Generation, stall: Stall) -> tuple[Self, Commands]:
        """Returns the membership once a generation ends without an iteration and without blame; maybe the run's end.

        Args:
            generation: newest generation.
            stall: what its members waited for.
        """
        stalled = (*self._stalled_before(generation), generation) if generation.form.number > self.last_worked else ()
        if len(stalled) < _MAX_STALLS:
            return replace(self, stalled=stalled), ()
        in_vain = f"{len(stalled)} generations in a row of the same members finished no iteration"
        remedy = f" (where it takes longer: --deadline {stall.deadline}=SECONDS)" if stall.deadline else ""
        return replace(self, stalled=stalled), (StopRun(f"{in_vain}: {stall.reason}{remedy}"),)

    def _after_break(self, generation: Generation, reason: str, time: float) -> tuple[Self, Commands]:
        """Returns the membership once members that all live cannot continue, and maybe the end of the run.

        Connections may fail for a while, and each attempt takes seconds only. So a generation that was never live
        counts where it is the first that stalls, or that was ``Deadlines.progress`` ago.
        """
        before = self._stalled_before(generation)
        if before and not generation.is_live and time - before[0].since <= self.deadlines.progress:
            return self, ()
        return self._after_stall(generation, Stall(reason))

    def _stalled_before(self, generation: Generation) -> tuple[Generation, ...]:
        """Returns the generations of the same processes that have stalled since the last iteration of any."""
        if not self.stalled or self.stalled[0].form.number <= self.last_worked:
            return ()
        now, then = ({process for process, _ in formed.form.members} for formed in (generation, self.stalled[0]))
        return self.stalled if now == then else ()

    def _restarted_or_ended(self, generation: Generation, stall: Stall, time: float) -> tuple[Self, Commands]:
        """Returns the membership once all are restarted without blame, or the run ends, see ``_after_stall``."""
        stalled, stop = self._after_stall(generation, stall)
        return (stalled, stop) if stop else stalled.restarted(stall.reason, time)

    def restarted(self, reason: str, time: float) -> tuple[Self, Commands]:
        """Returns the membership in which all live processes are being killed, to be restarted."""
        everyone = [status.member for status in self.statuses.values() if status.is_alive]
        return self._killed(everyone, time, is_excused=True), (RestartAll(reason),)

    def _killed(self, members: Collection[Member], time: float, *, is_excused: bool = False) -> Self:
        """Returns the membership with members being killed; those that were killed before get no more time to die."""
        statuses = [self.statuses[member.process] for member in members]
        killed_at = [status.killed if status.is_dying else time for status in statuses]
        return self.with_statuses(
            *(
                replace(status, is_dying=True, killed=at, is_excused=is_excused)
                for status, at in zip(statuses, killed_at, strict=True)
            )
        )

    def _retired(self, late: Collection[ProcessStatus]) -> tuple[Self, Commands]:
        """Returns the membership without processes that were killed and do not die, see ``failure_detector``."""
        reason = f"was killed, and has not died in {self.deadlines.dying:g} s"
        statuses = [replace(status, state=ProcessState.RETIRED, is_dying=False, is_excused=False) for status in late]
        return self.with_statuses(*statuses), tuple(Retire(status.member, reason) for status in late)

    def _restarts(self, may: MayRestart) -> Commands:
        """Returns the processes to start now, or the end of a run in which a stage can never be served again.

        Nothing is started during a recovery: starting a process takes seconds of CPU time that the members need.
        """
        dead = self.dead
        if not dead or self.failed or self.is_recovering:
            return ()
        gone = [
            process
            for process in dead
            if self.has_exhausted_restarts(process) or may.away.get(process, 0.0) > self.deadlines.start
        ]
        lost = self.lost_without(gone)
        if lost:
            stages = ", ".join(map(str, lost))
            away = " (or whose node has returned)" if any(may.away.values()) else ""
            which = f"stage {stages} has" if not self.policy.own_cut else f"layers of stages {stages} have"
            return (StopRun(f"{which} no process left that may be restarted{away}"),)
        startable = [
            process for process in dead if not self.has_exhausted_restarts(process) and not may.away.get(process)
        ]
        # Without a stage no iteration is ever finished, so a process held down until a later one would never return.
        down = may.held_down
        needed = self.lost_without([process for process in dead if process in down or process not in startable])
        return tuple(
            StartProcess(process) for process in startable if process not in down or process.worker[1] in needed
        )

    def _on_message(self, message: Message) -> tuple[Self, Commands]:
        """Returns the membership after a message, and the commands that follow at once.

        A process counted as dead that sends a message was frozen, cut off or retired: it is killed before it does harm.
        """
        member = message.member
        status = self.statuses[member.process]
        if member != status.member or not status.is_alive:
            return self, (
                Kill(member, f"incarnation {member.incarnation} is counted as dead and still sends messages"),
            )
        if isinstance(message, Heartbeat):  # most messages are: one copy of the status fewer
            return self._after_heartbeat(status, message), ()
        status = replace(status, seen=message.time)
        heard = self.with_statuses(status)
        match message:
            case Ready(number=number):
                is_news = status.state is ProcessState.STARTING or self._is_current(number)
                return self.with_statuses(replace(status, state=ProcessState.WAITING) if is_news else status), ()
            case RecutFailed(number=number):
                refused = replace(self, moves=self.moves.after_refusal())
                is_news = number == self.number and status.state is ProcessState.FORMING  # otherwise it runs on
                return refused.with_statuses(replace(status, state=ProcessState.WAITING) if is_news else status), ()
            case Departed():
                return heard._after_departed(message)
            case Formed():
                return heard._after_formed(message), ()
            case PhaseTimed():
                return heard._after_phase(message), ()
            case Loaded():
                return heard._after_loaded(message), ()
            case Done():
                return heard._after_done(message), ()

    def _is_current(self, number: int) -> bool:
        """Returns whether a generation is the newest, or the one before in which members still finish an iteration."""
        generation = self.generation
        if generation is None:
            return False
        return number == generation.form.number or (generation.form.after is not None and number == self.last_live)

    def _after_departed(self, message: Departed) -> tuple[Self, Commands]:
        generation = self.generation
        if (
            generation is None
            or message.number != generation.form.number
            or message.member not in generation.not_departed
        ):
            return self, ()
        waiting_since = message.time if generation.waiting_since is None else generation.waiting_since
        departed = generation.departed | {message.member}
        generation = replace(generation, since=message.time, departed=departed, waiting_since=waiting_since)
        enter = () if generation.not_departed else (Connect(generation.form.number, generation.form.members),)
        return replace(self, generation=generation), enter

    def _after_formed(self, message: Formed) -> Self:
        generation, (member, number, states, time, slices) = self.generation, message
        if generation is None or number != generation.form.number or member not in generation.not_formed:
            return self
        member_states = {**generation.member_states, member: states}
        return replace(
            self,
            generation=replace(
                generation, since=time, member_states=member_states, known_slices=generation.known_slices | slices
            ),
        )

    def _after_heartbeat(self, status: ProcessStatus, beat: Heartbeat) -> Self:
        """Members of the generation before count as making progress only where the newest waits for their iteration."""
        generation = self.generation
        if generation is None or beat.number != self.last_live or status.last_live != self.last_live:
            return self.with_statuses(replace(status, seen=beat.time))
        beaten = replace(status, seen=beat.time, entered=beat.entered, finished=beat.finished)
        updated = self.with_statuses(beaten)
        # The first heartbeat of a generation tells the iteration after which it runs; none is about to end before that.
        finished_before = (generation.base or 0) if generation.is_live else status.finished
        if beat.finished > finished_before and status.last_worked != beat.number:
            worked = replace(beaten, last_worked=beat.number)
            updated = replace(self.with_statuses(worked), last_worked=beat.number)
        if beat.finished > status.finished and (generation.is_live or generation.form.after is not None):
            return replace(updated, generation=replace(generation, since=beat.time))
        return updated

    def _after_phase(self, timed: PhaseTimed) -> Self:
        generation = self.generation
        if generation is None or timed.number != generation.form.number:
            return self
        if timed.phase == "state":
            return self._after_move(generation, timed.time)
        if timed.phase != "connect" or generation.is_live:
            return self
        return replace(
            self, generation=replace(generation, since=timed.time, linked=generation.linked | {timed.member})
        )

    def _after_move(self, generation: Generation, time: float) -> Self:
        """Returns the membership once a member has its state for a generation: how long moving blocks takes."""
        if not generation.form.cut or generation.waiting_since is None:
            return self
        return replace(self, moves=self.moves.after_move(time - generation.waiting_since))

    def _after_loaded(self, loaded: Loaded) -> Self:
        generation = self.generation
        if generation is None or generation.ahead is None or loaded.number != generation.form.number:
            return self
        return replace(self, generation=replace(generation, loaded=generation.loaded | {loaded.member}))

    def _after_done(self, done: Done) -> Self:
        generation = self.generation
        if generation is None or not generation.is_live or done.number != generation.form.number:
            return self
        return replace(self, generation=replace(generation, done=generation.done | {done.member}))


@dataclass(frozen=True)
class _Slices:
    """The slices that exist of the states of an elastic run.

    Attributes:
        layouts: layouts of all generations that were live, the newest last.
        held_by: states of which each member of a generation has its slice.
        known_slices: slices known to be kept elsewhere than by their owner.
    """

    layouts: Sequence[ShardLayout]
    held_by: Mapping[Process, frozenset[StateId]]
    known_slices: FoundSlices

    def layout_of(self, stamp: StateId) -> ShardLayout | None:
        """Returns the layout of a state; None for a state of another run."""
        return next((layout for layout in reversed(self.layouts) if stamp.generation in layout.generations), None)

    def missing(self, stamp: StateId) -> tuple[Process, ...]:
        """Returns the processes whose slices of a state do not exist."""
        layout = self.layout_of(stamp)
        assert layout is not None
        return tuple(process for process in layout.processes if not self._exists(process, stamp))

    def agreed(self) -> StateId | None:
        """Returns the state to resume from: a complete one if it is not much older, else the most complete.

        None if no process has any state, or if slices of the initial state are lost, which is cheaper to create again.
        """
        stamps = {stamp for states in self.held_by.values() for stamp in states if self.layout_of(stamp)}
        if not stamps:
            return None
        newest = max(stamps)
        recent = [stamp for stamp in stamps if stamp.step >= newest.step - _MAX_RERUN]
        complete = [stamp for stamp in recent if not self.missing(stamp)]
        if complete:
            return max(complete)
        same_layout = [stamp for stamp in recent if self.layout_of(stamp) == self.layout_of(newest)]
        fullest = max(same_layout, key=lambda stamp: (-len(self.missing(stamp)), stamp))
        return fullest if fullest.step else None

    def _exists(self, process: Process, stamp: StateId) -> bool:
        return stamp in self.held_by.get(process, ()) or (process, stamp) in self.known_slices


def _elastic_go_live(
    number: int, members: tuple[Member, ...], slices: _Slices
) -> tuple[ActivateGeneration, tuple[ShardLayout, ...]]:
    """Returns the command that makes a generation of an elastic run live, and the layouts of states from then on."""
    stamp, processes = slices.agreed(), tuple(member.process for member in members)
    if stamp is None:
        return ActivateGeneration(number, None), _extended_layouts(slices.layouts, None, number, processes)
    layout = slices.layout_of(stamp)
    assert layout is not None
    holders = tuple(member for member in members if stamp in slices.held_by[member.process])
    is_same = layout.processes == processes and holders == members
    go = ActivateGeneration(number, stamp, holders, None if is_same else layout, not slices.missing(stamp))
    return go, _extended_layouts(slices.layouts, layout if is_same else None, number, processes)


def _extended_layouts(
    layouts: Sequence[ShardLayout], layout: ShardLayout | None, number: int, members: Collection[Process]
) -> tuple[ShardLayout, ...]:
    """Returns the layouts with that of a generation that goes live.

    Args:
        layouts: layouts of the generations before.
        layout: layout that the generation keeps; None: its state is new, or resharded for its members.
        number: number of the generation.
        members: its processes.

    >>> old = ShardLayout((Process((0, 0)), Process((0, 0), 1)), (1,))
    >>> [layout.generations for layout in _extended_layouts([old], old, 2, old.processes)]
    [(1, 2)]
    >>> [layout.generations for layout in _extended_layouts([old], None, 2, [Process((0, 0))])]
    [(1,), (2,)]
    """
    if layout is None:
        return (*layouts, ShardLayout(tuple(members), (number,)))
    return tuple(
        earlier._replace(generations=(*earlier.generations, number)) if earlier == layout else earlier
        for earlier in layouts
    )
