"""Membership of a run of real processes: the state machine of the one authority, the supervisor.

The supervisor outlives the workers, so no agreement among them is needed: it decides, and workers obey. It reports all
that it sees to ``Membership.on``, then a ``Tick``, and carries out the commands that come back, in their order. Deaths
reported before the same ``Tick`` cost one generation together, and a heartbeat that waited in a queue is not missed.

A generation has two phases. ``Form`` takes every member out of the generation before; only when all have answered,
``Go`` makes it live, and ``StartGeneration`` lets them run, once the state to resume from is there. A process that may
still run is never left out of a generation: it is killed, and the generation waits until it has died.

A process in a system call that does not return (state D) cannot be killed: after ``Deadlines.dying`` it is retired, and
the next generation forms without it. Nothing that it may still do can do harm:

- Once it has been sent SIGKILL it runs no instruction of its own any more. The kernel may complete the system call: a
  write to a file under a temporary name, which nobody renames. It has sockets and memory of the old generation, which
  nobody uses.
- Where the signal has not reached it, as its node does not obey either, it is alone: the others have left the
  generation and closed their sockets, so no iteration ends that needs them. The next generation has other sockets, a
  coordination service and devices of its own, and admits its members alone. What the retired process says is ignored;
  what it keeps has the stamp of an older generation and the name of a place that is never filled again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from swift.deadlines import Deadlines
from swift.elastic.membership.commands import (
    Commands,
    Form,
    GiveUp,
    Go,
    ReshardState,
    RestartAll,
    RestoreState,
    Retire,
    StageLost,
    StartGeneration,
    StopRun,
)
from swift.elastic.membership.events import (
    Died,
    Event,
    Harmed,
    MayRestart,
    Restored,
    RestoreFailed,
    Started,
    Stored,
    Tick,
    Woke,
)
from swift.elastic.membership.hearing import hear
from swift.elastic.membership.processes import Member, Process, ShardLayout, Stamp, agreed_stamp
from swift.elastic.membership.restarts import restarts
from swift.elastic.membership.shard_ownership import Slices, continued
from swift.elastic.membership.status import Generation, ProcessStatus, State
from swift.elastic.membership.timeouts import overdue, undead
from swift.elastic.membership.view import MembershipView, RecoveryPolicy


@dataclass(frozen=True)
class Membership(MembershipView):
    """The membership of a run; it is never changed, ``on`` returns the next."""

    @classmethod
    def of(
        cls,
        processes: Sequence[Process],
        deadlines: Deadlines,
        time: float,
        policy: RecoveryPolicy | None = None,
    ) -> "Membership":
        """The membership of a run none of whose processes has been started yet."""
        statuses = {process: ProcessStatus(Member(process, -1)) for process in processes}
        return cls(tuple(processes), deadlines, statuses, time, policy or RecoveryPolicy())

    def on(self, event: Event) -> tuple["Membership", Commands]:
        """The membership after an event, and what the supervisor has to do.

        Only a ``Tick`` moves the generation. The other events are remembered; they may ask for the end of a process
        that should not exist, or of the run.
        """
        match event:
            case Tick(time):
                return self._decide(time)
            case Started(member, time):
                return self._started(member, time)
            case Died():
                return self._died(event)
            case Harmed(member):
                status = self.statuses[member.process]
                return self.with_statuses(replace(status, is_harmed=True)) if member == status.member else self, ()
            case Woke(time):
                return replace(self, deaf_until=time + self.deadlines.heartbeat), ()
            case Stored():
                return self._stored(event)
            case Restored():
                return self._restored(event)
            case RestoreFailed(number, _, why, remedy):
                return self, (StopRun(why, remedy),) if self.awaits_state(number) else ()
            case MayRestart():
                return self, restarts(self, event)
            case _:
                return hear(self, event)

    def excused(self, time: float) -> "Membership":
        """The same with the time of its generation's progress reset: members wait for something else."""
        return self if self.generation is None else replace(self, generation=replace(self.generation, since=time))

    def restarted(self, why: str, time: float) -> tuple["Membership", Commands]:
        """The membership once all live processes are to be killed and started again."""
        everybody = [status.member for status in self.statuses.values() if status.is_there]
        return self._killed(everybody, time, spared=True), (RestartAll(why),)

    def _started(self, member: Member, time: float) -> tuple["Membership", Commands]:
        last = self.statuses[member.process]
        assert last.state is State.DEAD, f"{member.process} is started again while it lives"
        assert member.incarnation > last.member.incarnation, "an incarnation is reused"
        status = ProcessStatus(member, State.STARTING, time, deaths=last.deaths, quick_deaths=last.quick_deaths)
        return self.with_statuses(status), ()

    def _died(self, death: Died) -> tuple["Membership", Commands]:
        member, status = death.member, self.statuses[death.member.process]
        if member != status.member or not status.is_there:
            return self, ()
        # A process that is killed with all others, or dies with its node, is not to blame.
        is_to_blame = death.is_own and not status.spared
        quick_deaths = 0 if status.lived else status.quick_deaths + is_to_blame
        deaths = status.deaths + (is_to_blame and not status.is_harmed)
        fresh = replace(status, state=State.DEAD, is_dying=False, spared=False, deaths=deaths)
        dead = self.with_statuses(replace(fresh, quick_deaths=quick_deaths))
        if quick_deaths >= self.deadlines.max_quick_deaths:
            why = f"died {quick_deaths} times in a row before it was live: {death.why}"
            return dead, (GiveUp(member.process, why),)
        if self.policy.recovery == "restart" and not status.spared and self.generation is not None:
            return dead.restarted(f"{member.process} died", death.time)
        return dead, ()

    def _decide(self, time: float) -> tuple["Membership", Commands]:
        if time < self.deaf_until:
            return self, ()
        if self.is_waiting:  # members that wait for a checkpoint are not late
            return self.excused(time)._decide_on_time(time)
        return self._decide_on_time(time)

    def _decide_on_time(self, time: float) -> tuple["Membership", Commands]:
        if late := undead(self, time):
            return self._retired(late)
        kills = {kill.member: kill for kill in overdue(self, time)}
        if kills:
            return self._killed(kills, time), tuple(kills.values())
        if any(status.is_dying for status in self.statuses.values()):
            return self, ()
        generation = self.generation
        if generation is None:
            return self._form(time) if self._is_assembled(time) else (self, ())
        if self.is_broken(generation):
            return self._form(time)
        return self._decide_live(generation, time) if generation.is_live else self._decide_forming(generation, time)

    def _decide_live(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Joiners wait until all members run, so that those that join one by one leave a generation time to work."""
        entered = [status.entered for status in self.members_of(generation)]
        if time - generation.since > self.deadlines.progress:
            # A process that hangs does not leave, and is found by that; the others keep their state.
            if self.retried != generation.form.number:
                again, commands = self._form(time)
                return replace(again, retried=again.number), commands
            why = f"nobody finished an iteration for {self.deadlines.progress:g} s, and all are in {entered[0]}"
            return self.restarted(why, time)
        if min(entered) > 0 and set(self.present()) - set(generation.form.members):
            return self._form(time, after=max(entered) + 1)
        return self, ()

    def _decide_forming(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Members that do not reach the iteration they were given, or not with the others, have to abort."""
        if not generation.missing:
            return self._go(generation, time)
        has_come = any(self.statuses[member.process].lived == self.went for member in generation.left)
        patience_s = self.deadlines.forming if has_come else self.deadlines.progress
        if self.is_winding_down(generation) and time - generation.since > patience_s:
            return self._form(time)
        return self, ()

    def _form(self, time: float, after: int | None = None) -> tuple["Membership", Commands]:
        lost = self.unmanned
        if lost:
            return self._gather(lost, time)
        form = Form(self.number + 1, self.present(), after)
        statuses = [
            replace(status, state=State.FORMING if status.member in form.members else State.WAITING)
            for status in self.statuses.values()
            if status.is_present
        ]
        formed = replace(self.with_statuses(*statuses), generation=Generation(form, time), number=form.number, lost=())
        return formed, (form,)

    def _gather(self, lost: tuple[int, ...], time: float) -> tuple["Membership", Commands]:
        """Waits for joiners. Nobody leaves the generation: without the stage its members finish no iteration."""
        is_new = not set(lost) <= set(self.lost)
        since = self.since if self.generation is None else time
        statuses = [replace(status, state=State.WAITING) for status in self.statuses.values() if status.is_present]
        gathering = replace(self.with_statuses(*statuses), generation=None, since=since, lost=lost)
        return gathering, (StageLost(lost),) if is_new else ()

    def _is_assembled(self, time: float) -> bool:
        """Whether a first generation, or one after a lost stage, need not wait for processes that are starting."""
        if time - self.since > self.deadlines.start:
            return True
        states = {status.state for status in self.statuses.values()} - {State.RETIRED}
        return State.STARTING not in states if self.number else states == {State.WAITING}

    def _go(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Makes a generation live. A restarted process may have found an old state, which is nobody else's newest."""
        number, members = generation.form.number, generation.form.members
        held_by = {member.process: held for member, held in generation.held.items()}
        cuts = self.cuts
        if self.policy.is_elastic:
            go, cuts = _elastic_go(generation, Slices(cuts, held_by, generation.found))
        else:
            stamp = agreed_stamp(self.processes, held_by)
            go = Go(number, stamp, _holders(generation, stamp))
        live = [
            replace(self.statuses[process], state=State.LIVE, lived=number, quick_deaths=0, entered=0, finished=0)
            for process, _ in members
        ]
        generation = replace(generation, since=time, go=go)
        return replace(self.with_statuses(*live), generation=generation, went=number, cuts=cuts), (go,)

    def _stored(self, stored: Stored) -> tuple["Membership", Commands]:
        """Has a live generation run, from the newest state there is: its members', or that of a checkpoint."""
        generation = self.generation
        if generation is None or generation.go is None or generation.restoring or generation.base is not None:
            return self, ()
        go, newest = generation.go, stored.newest
        if go.stamp is None:
            is_lost = stored.written > 0 or self.policy.is_resumed
            if is_lost and newest is None and not stored.is_busy:
                return self, (StopRun("nobody is left who has the state of some stage"),)
            is_better = is_lost
        else:  # a newer checkpoint is better where one of the two states is not all there
            is_better = newest is not None and newest > go.stamp.step and (stored.is_full or not go.is_whole)
        restoring: RestoreState | ReshardState
        if is_better:
            restoring = RestoreState(go.number)
        elif go.stamp is not None and go.cut is not None:
            restoring = ReshardState(go.number, go.stamp, go.cut)
        else:
            return self._start(generation, StartGeneration(go, stored.written), stored.time)
        return replace(self, generation=replace(generation, restoring=restoring)), (restoring,)

    def _restored(self, restored: Restored) -> tuple["Membership", Commands]:
        generation, (stamp, time, written) = self.generation, restored
        if generation is None or generation.go is None or not self.awaits_state(stamp.generation):
            return self, ()
        holders = generation.go.holders if isinstance(generation.restoring, ReshardState) else ()
        start = StartGeneration(Go(stamp.generation, stamp, holders), written, is_restored=True)
        return self._start(generation, start, time)

    def _start(self, generation: Generation, start: StartGeneration, time: float) -> tuple["Membership", Commands]:
        base = start.go.stamp.step if start.go.stamp else 0
        return replace(self, generation=replace(generation, since=time, restoring=None, base=base)), (start,)

    def _killed(self, members: Collection[Member], time: float, *, spared: bool = False) -> "Membership":
        """A process that is being killed already gets no more time to die."""
        statuses = [self.statuses[member.process] for member in members]
        killed = [status.killed if status.is_dying else time for status in statuses]
        return self.with_statuses(
            *(
                replace(status, is_dying=True, killed=at, spared=spared)
                for status, at in zip(statuses, killed, strict=True)
            )
        )

    def _retired(self, late: Collection[ProcessStatus]) -> tuple["Membership", Commands]:
        statuses = [replace(status, state=State.RETIRED, is_dying=False, spared=False) for status in late]
        why = f"was killed, and has not died in {self.deadlines.dying:g} s"
        return self.with_statuses(*statuses), tuple(Retire(status.member, why) for status in statuses)


def _elastic_go(generation: Generation, slices: Slices) -> tuple[Go, tuple[ShardLayout, ...]]:
    """The command with which an elastic generation goes live, and the layouts of states from then on."""
    number, members, stamp = generation.form.number, generation.form.members, slices.agreed()
    processes = tuple(member.process for member in members)
    if stamp is None:
        return Go(number, None), continued(slices.cuts, None, number, processes)
    cut, holders = slices.cut_of(stamp), _holders(generation, stamp)
    assert cut is not None
    is_same = cut.processes == processes and holders == members
    go = Go(number, stamp, holders, None if is_same else cut, not slices.missing(stamp))
    return go, continued(slices.cuts, cut if is_same else None, number, processes)


def _holders(generation: Generation, stamp: Stamp | None) -> tuple[Member, ...]:
    return tuple(member for member in generation.form.members if stamp in generation.held[member])
