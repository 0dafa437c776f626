"""The state machine that decides on a run's generations and on its recovery from failures.

The supervisor outlives the workers, so they need no agreement among themselves: it decides, and workers obey. It
reports everything that it observes to ``Membership.on``, then a ``Tick``, and carries out the returned commands in
order. Deaths reported before the same ``Tick`` cost one generation together, and a heartbeat that waited in a queue
still counts.

A generation forms in two rounds. ``Form`` takes every member out of the generation before; when all have answered,
``GoLive`` makes it live, and ``StartGeneration`` lets the members run once the state to resume from is available. A
process that may still be running is never left out of a generation: it is killed, and the generation waits for its
death.

When a member is lost, the others continue re-routed. Once a better cut is prepared for them, and moving pays, they
load its programs while they run, and then form a generation with it, in which they keep their connections and devices.
Every other generation has the cuts of the run, so that blocks move back when anything changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift.deadlines import Deadlines
from swift.elastic.membership.block_moves import BlockMoves
from swift.elastic.membership.commands import (
    Commands,
    Form,
    GoLive,
    LoadAhead,
    ReshardState,
    RestoreState,
    StageLost,
    StartGeneration,
    StopRun,
)
from swift.elastic.membership.events import (
    CheckpointsListed,
    CutFound,
    Died,
    Event,
    FaultInjected,
    MayRestart,
    Restored,
    RestoreFailed,
    Started,
    StopRequested,
    Tick,
    Woke,
)
from swift.elastic.membership.failure_detector import Stall, overdue, unformed, unkillable
from swift.elastic.membership.generation import Generation
from swift.elastic.membership.lifecycle import (
    after_break,
    after_death,
    after_failures,
    after_stall,
    after_start,
    killed,
    restarted,
    restarted_or_ended,
    restarts,
    retired,
)
from swift.elastic.membership.members import Member, Process, agreed_stamp
from swift.elastic.membership.message_handlers import after_message
from swift.elastic.membership.run_status import ProcessState, ProcessStatus, RecoveryPolicy, RunStatus
from swift.elastic.membership.shard_ownership import Slices, elastic_go_live
from swift.schedules.plans.holders import OWN_CUT


@dataclass(frozen=True)
class Membership(RunStatus):
    """The membership of a run. It is immutable: ``on`` returns the next one."""

    @classmethod
    def of(
        cls, processes: Sequence[Process], deadlines: Deadlines, time: float, policy: RecoveryPolicy | None = None
    ) -> "Membership":
        """Returns the membership of a run before any of its processes has been started."""
        statuses = {process: ProcessStatus(Member(process, -1)) for process in processes}
        policy = policy or RecoveryPolicy()
        return cls(tuple(processes), deadlines, statuses, time, policy, moves=BlockMoves(policy.move_rule))

    def on(self, event: Event) -> tuple["Membership", Commands]:
        """Returns the membership after an event, and the commands to carry out.

        Only a ``Tick`` changes the generation. Other events are recorded; at most they lead to the end of a process
        that should not exist, or of the run.
        """
        match event:
            case Tick(time):
                return self._after_tick(time)
            case Started(member, time):
                return after_start(self, member, time), ()
            case Died():
                return after_death(self, event)
            case FaultInjected(member):
                status = self.statuses[member.process]
                if member != status.member:
                    return self, ()
                return self.with_statuses(replace(status, has_injected_fault=True)), ()
            case Woke(time):
                return replace(self, holds_until=time + self.deadlines.heartbeat), ()
            case CheckpointsListed():
                return self._choose_state(event)
            case Restored():
                return self._after_restore(event)
            case RestoreFailed(number, _, why, remedy):
                return self, (StopRun(why, remedy),) if self.awaits_state(number) else ()
            case CutFound():
                return replace(self, moves=self.moves.after_found(event)), ()
            case StopRequested():
                return replace(self, is_stopping=True), ()
            case MayRestart():
                return self, restarts(self, event)
            case _:
                return after_message(self, event)

    def with_clock_reset(self, time: float) -> "Membership":
        """Returns the membership with ``time`` as that of its generation's last progress: members wait for others."""
        return self if self.generation is None else replace(self, generation=replace(self.generation, since=time))

    def _after_tick(self, time: float) -> tuple["Membership", Commands]:
        if time < self.holds_until:
            return self, ()
        # Members that wait for a checkpoint are not late.
        return (self.with_clock_reset(time) if self.is_waiting else self)._decide(time)

    def _decide(self, time: float) -> tuple["Membership", Commands]:
        if late := unkillable(self, time):
            return retired(self, late)
        kills = {kill.member: kill for kill in overdue(self, time)}
        if kills:
            return killed(self, kills, time), tuple(kills.values())
        if any(status.is_dying for status in self.statuses.values()):
            return self, ()
        generation = self.generation
        if generation is None:
            return self._form(time) if self.is_assembled(time) else (self, ())
        if self.failed:
            return after_failures(self, generation, time)
        if self.is_broken(generation):
            return self._form_after_break(generation, time)
        return self._decide_live(generation, time) if generation.is_live else self._decide_forming(generation, time)

    def _decide_live(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Admits joiners once all members run, so that a series of joiners still leaves a generation time to work.

        If there are none, members take over blocks where that pays.
        """
        entered = [status.entered for status in self.members_of(generation)]
        if time - generation.since > self.deadlines.progress:
            why = f"no process finished an iteration for {self.deadlines.progress:g} s, and all are in {entered[0]}"
            stalled, stop = after_stall(self, generation, Stall(why, "progress"))
            if stop:
                return stalled, stop
            # A hanging process does not leave, which identifies it; the others keep their state.
            if self.retried != generation.form.number and not self.policy.joins_once:
                again, commands = stalled._form(time)
                return replace(again, retried=again.number), commands
            return restarted(stalled, why, time)
        if self.is_stopping:
            return self, ()
        if min(entered) > 0 and (joiners := set(self.present()) - set(generation.form.members)):
            joined = ", ".join(sorted(str(member.process) for member in joiners))
            return self._form_next(generation, time, f"{joined} can rejoin", after=max(entered) + 1)
        if min(entered) > 0 and self.moves.found is not None and (better := self.moves.better(self.failed_workers)):
            return self._move(generation, time, better, after=max(entered) + 1)
        return self, ()

    def _move(self, live: Generation, time: float, better: CutFound, after: int) -> tuple["Membership", Commands]:
        """Forms a generation with a better cut once its members have loaded the programs, however long that takes."""
        ahead = LoadAhead(live.form.number, live.form.members, better.cut)
        if live.ahead != ahead:
            return replace(self, generation=replace(live, ahead=ahead, loaded=frozenset())), (ahead,)
        is_loaded = live.loaded >= set(ahead.members)
        return self._form(time, after=after, better=better) if is_loaded else (self, ())

    def _decide_forming(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Aborts members that do not finish the iteration after which they leave, or not together with the others."""
        if not generation.not_formed:
            return self._go_live(generation, time)
        if stall := unformed(self, generation, time):
            return restarted_or_ended(self, generation, stall, time)
        has_left = any(self.statuses[member.process].last_live == self.last_live for member in generation.departed)
        limit_s = self.deadlines.forming if has_left else self.deadlines.progress
        if self.is_finishing_previous(generation) and time - generation.since > limit_s:
            return self._form(time)
        return self, ()

    def _form_after_break(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        why = "a process could not continue"
        is_any_lost = any(not one.is_alive for one in self.members_of(generation))
        if self.policy.recovery == "live" or is_any_lost:
            return self._form_next(generation, time, why)
        stalled, stop = after_break(self, generation, why, time)
        return (stalled, stop) if stop else stalled._form_next(generation, time, why)

    def _form_next(
        self, generation: Generation, time: float, why: str, after: int | None = None
    ) -> tuple["Membership", Commands]:
        """Forms a generation that follows another one; where processes join only one, all are restarted before.

        That waits until those that are starting are there, and until all members must have a copy of their state. There
        is none for joiners once a member has run all its iterations.
        """
        if not self.policy.joins_once:
            return self._form(time, after=after)
        if after is not None:
            is_starting = any(status.state is ProcessState.STARTING for status in self.statuses.values())
            finished = min(status.finished for status in self.members_of(generation))
            has_copies = finished >= (generation.base or 0) + 2 * self.policy.copy_every
            if is_starting or generation.done or not has_copies:
                return self, ()
        have_joined = [one for one in self.statuses.values() if one.member in generation.form.members]
        return restarted(self, why, time) if any(one.is_alive for one in have_joined) else self._form(time)

    def _form(
        self, time: float, after: int | None = None, better: CutFound | None = None
    ) -> tuple["Membership", Commands]:
        """Forms a generation of all that are present, with the cuts of the run unless it is to use a better one."""
        lost = self.unserved_stages
        if lost:
            return self._await_stages(lost, time)
        form = Form(self.number + 1, self.present(), after, OWN_CUT if better is None else better.cut)
        statuses = [
            replace(status, state=ProcessState.FORMING if status.member in form.members else ProcessState.WAITING)
            for status in self.statuses.values()
            if status.is_present
        ]
        formed = replace(self.with_statuses(*statuses), generation=Generation(form, time), number=form.number, lost=())
        return replace(formed, moves=self.moves.after_form(form.number, self.failed_workers, time, better)), (form,)

    def _await_stages(self, lost: tuple[int, ...], time: float) -> tuple["Membership", Commands]:
        """Waits for joiners. No member leaves its generation: without the stage it finishes no iteration anyway."""
        is_new = not set(lost) <= set(self.lost)
        since = self.since if self.generation is None else time
        statuses = [replace(one, state=ProcessState.WAITING) for one in self.statuses.values() if one.is_present]
        waiting = replace(self.with_statuses(*statuses), generation=None, since=since, lost=lost)
        return waiting, (StageLost(lost),) if is_new else ()

    def _go_live(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Makes a generation live, from the newest state of which every stage has a complete worker.

        A restarted process may hold only an older state than the others.
        """
        number, members = generation.form.number, generation.form.members
        held_by = {member.process: held for member, held in generation.held.items()}
        layouts = self.layouts
        if self.policy.is_elastic:
            slices = Slices(layouts, held_by, generation.found)
            go, layouts = elastic_go_live(number, members, slices)
        else:
            stamp = agreed_stamp(self.processes, held_by, self.cut_of)
            holders = tuple(member for member in members if stamp in generation.held[member])
            go = GoLive(
                number, stamp, holders, cut=self.moves.cuts.get(stamp.generation, OWN_CUT) if stamp else OWN_CUT
            )
        live = [
            replace(self.statuses[process], state=ProcessState.LIVE, last_live=number, entered=0, finished=0)
            for process, _ in members
        ]
        generation = replace(generation, since=time, go=go)
        return replace(self.with_statuses(*live), generation=generation, last_live=number, layouts=layouts), (go,)

    def _choose_state(self, listed: CheckpointsListed) -> tuple["Membership", Commands]:
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

    def _after_restore(self, restored: Restored) -> tuple["Membership", Commands]:
        generation, (stamp, time, written) = self.generation, restored
        if generation is None or generation.go is None or not self.awaits_state(stamp.generation):
            return self, ()
        holders = generation.go.holders if isinstance(generation.restoring, ReshardState) else ()
        start = StartGeneration(GoLive(stamp.generation, stamp, holders), written, is_restored=True)
        return self._run(generation, start, time)

    def _run(self, generation: Generation, start: StartGeneration, time: float) -> tuple["Membership", Commands]:
        base = start.go.stamp.step if start.go.stamp else 0
        return replace(self, generation=replace(generation, since=time, restoring=None, base=base)), (start,)
