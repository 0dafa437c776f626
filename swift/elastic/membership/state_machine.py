"""The state machine that forms generations and recovers from failures.

The supervisor outlives the workers, so workers need no consensus protocol: the supervisor decides, and workers obey. It
reports all observations to ``Membership.on``, then a ``Tick``, and carries out the returned commands in order. Failures
and joiners change the generation only at a ``Tick``: several deaths reported before the same ``Tick`` cost only one
generation, and a heartbeat that was still queued counts.

A generation forms in two rounds. ``FormGeneration`` makes every member leave the old generation; once all have left,
``Connect`` makes them connect to each other. ``ActivateGeneration`` then makes the generation live, and
``StartGeneration`` lets the members train once the state to resume from is available. A process that may still be
running is never left out of a generation: the supervisor kills it, and the generation waits for its death.

When a member is lost, its micro-batches are re-routed to the others. Once a better cut of the layers is prepared for
the survivors, and moving blocks pays, they load its programs while they train. Then they form a generation with that
cut, keeping connections and devices. Every other generation uses the run's own cut, so blocks move back when anything
changes.

With ``--recovery restart``, one death restarts all processes. A process that repeatedly fails at its start is excluded,
and the others continue without it. If several fail at the same time, they may have a common cause, and none is blamed.
The number of restarts without progress is limited, too.

With one pipeline of one stage and one process per expert rank, no other process has a rank's slices. Such a run is
*elastic*: the remaining ranks continue without the lost ones, from a state that is resharded for them. ``_Slices``
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
    newest_complete_state,
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
"""Number of consecutive generations of the same processes without a finished iteration after which the run stops."""
_TOGETHER_S = 1.0
"""Failures within this many seconds after a process died at its start count as simultaneous."""
_MAX_RERUN = 2
"""Maximum number of iterations to re-run for a complete state; processes store only their last two states."""


@dataclass(frozen=True)
class Membership(RunStatus):
    """The membership of a run: its status, and the decisions on it. Immutable; ``on`` returns the next membership."""

    @classmethod
    def of(
        cls, processes: Sequence[Process], deadlines: Deadlines, time: float, policy: RecoveryPolicy | None = None
    ) -> Self:
        """Returns the membership of a run before any process is started."""
        statuses = {process: ProcessStatus(Member(process, -1)) for process in processes}
        policy = policy or RecoveryPolicy()
        return cls(tuple(processes), deadlines, statuses, time, policy, moves=BlockMoves(policy.move_rule))

    def on(self, event: Event) -> tuple[Self, Commands]:
        """Returns the membership after an event, and the commands to carry out.

        A ``Tick`` may form another generation, and so may ``CheckpointsListed`` if the state to resume from has another
        cut than the generation. All other events are recorded; some also cause commands at once, for example to
        connect, to restart processes, to kill a process that should not exist, or to stop the run.
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
        """Restarts the progress deadline at ``time``, because the members wait for something other than each other."""
        return self if self.generation is None else replace(self, generation=replace(self.generation, since=time))

    def _after_tick(self, time: float) -> tuple[Self, Commands]:
        if time < self.paused_until:
            return self, ()
        # While a state is loaded, or once all iterations are done, members have nothing to finish: that time must not
        # count against their deadlines.
        return (self.with_clock_reset(time) if self.is_waiting else self)._decide(time)

    def _decide(self, time: float) -> tuple[Self, Commands]:
        if late := unkillable(self, time):
            return self._retired(late)
        kills = {kill.member: kill for kill in overdue(self, time)}
        if kills:
            return self._killed(kills, time), tuple(kills.values())
        # A killed process may still use its sockets and devices: no generation forms until its death is certain.
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
        """Decides for a live generation: end a stall, admit joiners, or move to a better cut.

        Joiners are admitted only once all members run, so that a series of joiners cannot stop all progress.
        """
        entered = [status.entered for status in self.members_of(generation)]
        if time - generation.since > self.deadlines.progress:
            reason = f"no process finished an iteration for {self.deadlines.progress:g} s, and all are in {entered[0]}"
            stalled, stop = self._after_stall(generation, Stall(reason, "progress"))
            if stop:
                return stalled, stop
            # No process can be blamed yet. A new generation identifies the culprit: a hanging process does not leave
            # the old one and misses its deadline, while the others store their state as they leave.
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
        """Preloads the programs of a better cut, and forms a generation with it once all members have loaded them.

        No deadline applies: the members keep training while they load.
        """
        ahead = PreloadPrograms(live.form.number, live.form.members, better.cut)
        if live.ahead != ahead:
            return replace(self, generation=replace(live, ahead=ahead, loaded=frozenset())), (ahead,)
        is_loaded = live.loaded >= set(ahead.members)
        return self._form(time, after=after, better=better) if is_loaded else (self, ())

    def _decide_forming(self, generation: Generation, time: float) -> tuple[Self, Commands]:
        """Decides while a generation forms: make it live, end a stall, or abort a last iteration that takes too long.

        Members may be finishing an iteration before they leave. If that misses its deadline, a new generation is
        formed whose members leave at once.
        """
        if not generation.not_formed:
            return self._go_live(generation, time)
        if stall := unformed(self, generation, time):
            return self._restarted_or_ended(generation, stall, time)
        # Members finish an iteration at about the same time: once one has left, the others get the shorter limit.
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
        """Forms the generation that follows another; on accelerators, by restarting all processes first.

        An accelerator process can join only one generation (``RecoveryPolicy.joins_once``). To admit joiners, the
        restart waits until all starting processes are ready and every member is certain to have a copy of its state.
        Once a member has run all its iterations, joiners are no longer admitted.
        """
        if not self.policy.joins_once:
            return self._form(time, after=after)
        if after is not None:
            is_starting = any(status.state is ProcessState.STARTING for status in self.statuses.values())
            finished = min(status.finished for status in self.members_of(generation))
            # Two periods, since the copy that was begun at the last multiple may still be in progress.
            has_copies = finished >= (generation.base or 0) + 2 * self.policy.memory_checkpoint_every
            if is_starting or generation.done or not has_copies:
                return self, ()
        have_joined = [status for status in self.statuses.values() if status.member in generation.form.members]
        return self.restarted(reason, time) if any(status.is_alive for status in have_joined) else self._form(time)

    def _form(self, time: float, after: int | None = None, better: RecutReady | None = None) -> tuple[Self, Commands]:
        """Forms a generation of all processes that are present, with the run's own cut unless a better one is given."""
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
        """Ends the generation and waits for joiners, since no process is left for some stages.

        Members are not told to leave: without these stages they cannot finish an iteration anyway.
        """
        is_new = not set(lost) <= set(self.lost)
        since = self.since if self.generation is None else time
        statuses = [
            replace(status, state=ProcessState.WAITING) for status in self.statuses.values() if status.is_present
        ]
        waiting = replace(self.with_statuses(*statuses), generation=None, since=since, lost=lost)
        return waiting, (StageLost(lost),) if is_new else ()

    def _go_live(self, generation: Generation, time: float) -> tuple[Self, Commands]:
        """Makes a generation live, resuming from the newest state that complete workers hold for every stage.

        This may not be the newest state that any process holds: a restarted process may have only an older one.
        """
        number, members = generation.form.number, generation.form.members
        held_by = {member.process: states for member, states in generation.member_states.items()}
        layouts = self.layouts
        if self.policy.is_elastic:
            slices = _Slices(layouts, held_by, generation.known_slices)
            go, layouts = _elastic_go_live(number, members, slices)
        else:
            stamp = newest_complete_state(self.processes, held_by, self.cut_of)
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
        """Starts a live generation from the newest available state: that of its members, or a checkpoint."""
        generation = self.generation
        if generation is None or generation.go is None or generation.restoring or generation.base is not None:
            return self, ()
        go, newest = generation.go, listed.newest
        if go.stamp is None:
            is_lost = listed.written > 0 or self.policy.begins_with_state
            if is_lost and newest is None and not listed.is_busy:
                return self, (StopRun("no process is left that has the state of some stage"),)
            is_better = is_lost
        else:  # a newer checkpoint wins, unless it lacks experts while the members' state is whole
            is_better = newest is not None and newest > go.stamp.step and (listed.is_full or not go.is_whole)
        restoring: RestoreState | ReshardState
        if generation.form.cut and (is_better or go.stamp is None):
            return self._form(listed.time)  # checkpoints and initial states have the run's own cut
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
        """Records that a new incarnation of a dead process was started."""
        last = self.statuses[member.process]
        assert last.state is ProcessState.DEAD, f"{member.process} is started while it is alive"
        assert member.incarnation > last.member.incarnation, "an incarnation is reused"
        status = ProcessStatus(member, ProcessState.STARTING, time, deaths=last.deaths, quick_deaths=last.quick_deaths)
        return self.with_statuses(status)

    def _on_death(self, death: Died) -> tuple[Self, Commands]:
        """Records a death, counts it if the process is to blame, and restarts all processes if the policy requires it.

        With ``--recovery restart``, a death at the start is only recorded: ``_after_failures`` decides once it is known
        whether others failed at the same time.
        """
        member, status = death.member, self.statuses[death.member.process]
        if member != status.member or not status.is_alive:
            return self, ()
        # Deaths from fault injection, restart-all and node loss do not count: the process did nothing wrong.
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
        """Blames a process that failed at its start, once it is known that no other failed at the same time.

        If several fail together, they may have a common cause, such as the network or a program that needs too much
        memory. Excluding one of them would not help, because the others would still fail.
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
        """Counts a death against its process, and excludes it or aborts the run after too many deaths in a row."""
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
        """Returns whether an incarnation got past its start, so that its death does not count as a failed start.

        With ``--recovery live``, having been live once is enough: a later failure does not hold up the survivors. Where
        a death restarts all processes, the incarnation must have finished an iteration, since the first computation may
        reveal a broken device.
        """
        return bool(status.last_live if self.policy.recovery == "live" else status.last_worked)

    def _fails_alone(self, process: Process) -> bool:
        """Returns whether a process that fails at its start can be excluded: the others can run and do not fail too.

        Until some generation has finished an iteration, the cause may be one that makes every process fail.
        """
        if self.policy.recovery == "live" or self.lost_without(
            [candidate for candidate in self.processes if self.has_exhausted_restarts(candidate)]
        ):
            return False
        quick_deaths = sum(status.quick_deaths for other, status in self.statuses.items() if other != process)
        return self.last_worked > 0 or quick_deaths < self.deadlines.max_quick_deaths

    def _after_stall(self, generation: Generation, stall: Stall) -> tuple[Self, Commands]:
        """Counts a generation that finished no iteration, with no process to blame; stops the run at ``_MAX_STALLS``.

        Args:
            generation: newest generation.
            stall: why it ended.
        """
        stalled = (*self._stalled_before(generation), generation) if generation.form.number > self.last_worked else ()
        if len(stalled) < _MAX_STALLS:
            return replace(self, stalled=stalled), ()
        in_vain = f"{len(stalled)} generations in a row of the same members finished no iteration"
        remedy = f" (where it takes longer: --deadline {stall.deadline}=SECONDS)" if stall.deadline else ""
        return replace(self, stalled=stalled), (StopRun(f"{in_vain}: {stall.reason}{remedy}"),)

    def _after_break(self, generation: Generation, reason: str, time: float) -> tuple[Self, Commands]:
        """Counts a generation that broke although all its members are alive; stops the run if there were too many.

        The network may fail for a while, and each attempt takes only seconds, so counting every attempt would end the
        run too early. A generation that was never live therefore counts only if it is the first that stalled, or if the
        first was more than ``Deadlines.progress`` ago.
        """
        before = self._stalled_before(generation)
        if before and not generation.is_live and time - before[0].since <= self.deadlines.progress:
            return self, ()
        return self._after_stall(generation, Stall(reason))

    def _stalled_before(self, generation: Generation) -> tuple[Generation, ...]:
        """Returns the generations of the same processes that have stalled since the last finished iteration."""
        if not self.stalled or self.stalled[0].form.number <= self.last_worked:
            return ()
        now, then = ({process for process, _ in formed.form.members} for formed in (generation, self.stalled[0]))
        return self.stalled if now == then else ()

    def _restarted_or_ended(self, generation: Generation, stall: Stall, time: float) -> tuple[Self, Commands]:
        """Restarts all processes without blame, or stops the run, see ``_after_stall``."""
        stalled, stop = self._after_stall(generation, stall)
        return (stalled, stop) if stop else stalled.restarted(stall.reason, time)

    def restarted(self, reason: str, time: float) -> tuple[Self, Commands]:
        """Kills all live processes, to restart them; none of these deaths counts against its process."""
        everyone = [status.member for status in self.statuses.values() if status.is_alive]
        return self._killed(everyone, time, is_excused=True), (RestartAll(reason),)

    def _killed(self, members: Collection[Member], time: float, *, is_excused: bool = False) -> Self:
        """Marks members as being killed; those that were killed before keep their earlier deadline."""
        statuses = [self.statuses[member.process] for member in members]
        killed_at = [status.killed if status.is_dying else time for status in statuses]
        return self.with_statuses(
            *(
                replace(status, is_dying=True, killed=at, is_excused=is_excused)
                for status, at in zip(statuses, killed_at, strict=True)
            )
        )

    def _retired(self, late: Collection[ProcessStatus]) -> tuple[Self, Commands]:
        """Retires processes that were killed and do not die; ``failure_detector`` explains why that is safe."""
        reason = f"was killed, and has not died in {self.deadlines.dying:g} s"
        statuses = [replace(status, state=ProcessState.RETIRED, is_dying=False, is_excused=False) for status in late]
        return self.with_statuses(*statuses), tuple(Retire(status.member, reason) for status in late)

    def _restarts(self, may: MayRestart) -> Commands:
        """Returns commands to restart dead processes, or to stop the run if some stage can never be served again.

        Nothing is started during a recovery, since a starting process takes seconds of CPU time from the members.
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
        # Fault injection holds a process down until some iteration. If its stage is lost, no iteration would ever be
        # finished, and the process would never return: start it now.
        down = may.held_down
        needed = self.lost_without([process for process in dead if process in down or process not in startable])
        return tuple(
            StartProcess(process) for process in startable if process not in down or process.worker[1] in needed
        )

    def _on_message(self, message: Message) -> tuple[Self, Commands]:
        """Records a message, and returns the commands that it causes at once.

        A process that counts as dead but still sends messages was frozen, cut off or retired: it is killed before it
        can do harm.
        """
        member = message.member
        status = self.statuses[member.process]
        if member != status.member or not status.is_alive:
            return self, (
                Kill(member, f"incarnation {member.incarnation} is counted as dead and still sends messages"),
            )
        if isinstance(message, Heartbeat):  # by far the most frequent message: saves one copy of the status
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
        """Returns whether a generation is the newest, or the previous one while members finish an iteration in it."""
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
        """Records a member's progress, and restarts the deadlines of its generation when it has finished an iteration.

        While the next generation forms, progress counts only if that generation waits for the members to finish their
        iteration.
        """
        generation = self.generation
        if generation is None or beat.number != self.last_live or status.last_live != self.last_live:
            return self.with_statuses(replace(status, seen=beat.time))
        beaten = replace(status, seen=beat.time, entered=beat.entered, finished=beat.finished)
        updated = self.with_statuses(beaten)
        # The first heartbeat reports the iteration that the generation resumes from, which is not progress. It comes
        # before the next generation begins to form, so from then on ``status.finished`` is the right baseline.
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
        """Records how long moving blocks has taken, once a member has its state for the generation."""
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
    """The state slices of an elastic run that still exist.

    Attributes:
        layouts: layouts of all generations that were live, the newest last.
        held_by: for each member of a generation, the states that it has its slice of.
        known_slices: known copies of slices outside the process that owns them.
    """

    layouts: Sequence[ShardLayout]
    held_by: Mapping[Process, frozenset[StateId]]
    known_slices: FoundSlices

    def layout_of(self, stamp: StateId) -> ShardLayout | None:
        """Returns the layout of a state, or None if another run computed it."""
        return next((layout for layout in reversed(self.layouts) if stamp.generation in layout.generations), None)

    def missing(self, stamp: StateId) -> tuple[Process, ...]:
        """Returns the owners of a state's missing slices."""
        layout = self.layout_of(stamp)
        assert layout is not None
        return tuple(process for process in layout.processes if not self._exists(process, stamp))

    def agreed(self) -> StateId | None:
        """Returns the state to resume from: the newest complete one if that is recent, else the one with fewest gaps.

        Returns None if no process has any state, or if slices of the initial state are lost, since it is cheaper to
        initialize again.
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
    """Returns the command that makes a generation of an elastic run live, and the state layouts including its own."""
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
    """Returns the layouts after a generation goes live: it extends the layout that it keeps, or adds one.

    Args:
        layouts: layouts of the earlier generations.
        layout: layout that the generation keeps; None if its state is new or resharded for its members.
        number: number of the generation.
        members: processes of the generation.

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
