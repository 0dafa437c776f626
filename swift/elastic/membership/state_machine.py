"""Who is a member of a run of real processes: the state machine of the one authority, the supervisor.

The supervisor outlives the workers, so nobody has to agree with anybody: it decides, and workers obey. It tells
``Membership.on`` all that it sees, then a ``Tick``, and carries out the commands that come back, in their order. Deaths
that are told before the same ``Tick`` cost one generation together, and a heartbeat that waited in a queue is not
missed.

A generation has two phases. ``Form`` takes every member out of the generation before; only when all have answered,
``Go`` lets them run. Who may still run is never left out of a generation: it is killed, and the generation waits until
it has died.

A process in the midst of a system call that does not end (state D) cannot be killed: after ``Deadlines.dying`` it is
retired, and the next generation forms without it. Nothing that it may still do can do harm:

- Once it has been sent SIGKILL it runs no instruction of its own any more. The kernel may end what it was at: a write
  to a file under a temporary name, which nobody renames. It has sockets and memory of the old generation: nobody uses
  them.
- Where the signal has not reached it, as its node does not obey either, it is alone: the others have left the
generation and
  closed their sockets, so no iteration ends that needs them. The next generation has other sockets, and a coordination
  service and devices of its own, and lets in its members alone. What the retired process says does not count; what it
  keeps has the stamp of an older generation and the name of a place that is never filled again, where nobody looks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from swift.deadlines import Deadlines
from swift.elastic.membership.protocol import (
    Beat,
    Command,
    Departed,
    Died,
    Enter,
    Event,
    Form,
    Formed,
    Generation,
    GiveUp,
    Go,
    Kill,
    Member,
    Message,
    Process,
    ProcessStatus,
    Ready,
    RestartAll,
    Retire,
    ShardLayout,
    StageLost,
    Stamp,
    Started,
    State,
    Tick,
    Took,
    agreed_stamp,
    lost_stages,
    whole_workers,
)
from swift.elastic.membership.shard_ownership import Slices, continued

Commands = tuple[Command, ...]


@dataclass(frozen=True)
class Membership:
    """The membership of a run at one moment; it is never changed, ``on`` returns the next.

    Attributes:
        processes: all that the run may have, of all stages.
        deadlines: how long to wait for what.
        statuses: what is known of every process.
        since: when the run began, or its generation ended for want of a stage.
        generation: None while there is none: at the beginning, and while a stage has nobody.
        number: the newest generation that was ever formed.
        went: the newest that was ever live.
        lost: the stages that have been told to be lost since the last generation.
        retried: the newest generation that was formed since nobody in the one before got on; 0: none.
        is_elastic: whether any ranks can go on without the others, see ``swift.elastic.membership.shard_ownership``.
        cuts: of the states of an elastic run.
    """

    processes: tuple[Process, ...]
    deadlines: Deadlines
    statuses: Mapping[Process, ProcessStatus]
    since: float
    generation: Generation | None = None
    number: int = 0
    went: int = 0
    lost: tuple[int, ...] = ()
    retried: int = 0
    is_elastic: bool = False
    cuts: tuple[ShardLayout, ...] = ()

    @classmethod
    def of(
        cls, processes: Sequence[Process], deadlines: Deadlines, time: float, *, is_elastic: bool = False
    ) -> "Membership":
        """The membership of a run none of whose processes has been started yet."""
        statuses = {process: ProcessStatus(Member(process, -1)) for process in processes}
        return cls(tuple(processes), deadlines, statuses, time, is_elastic=is_elastic)

    def on(self, event: Event) -> tuple["Membership", Commands]:
        """The membership after an event, and what the supervisor has to do.

        Only a ``Tick`` moves the generation. The other events are remembered; they may ask for the end of a process
        that should not be there, or of the run.
        """
        match event:
            case Tick(time):
                return self._decide(time)
            case Started(member, time):
                status = self.statuses[member.process]
                assert status.state is State.DEAD, f"{member.process} is started again while it lives"
                assert member.incarnation > status.member.incarnation, "an incarnation comes back"
                return self._with(ProcessStatus(member, State.STARTING, time, quick_deaths=status.quick_deaths)), ()
            case Died():
                return self._died(event)
            case _:
                return self._heard(event)

    def excused(self, time: float) -> "Membership":
        """The members of the generation wait for something that is not theirs to do: it is not held against them."""
        return self if self.generation is None else replace(self, generation=replace(self.generation, since=time))

    def restarted(self, why: str, time: float) -> tuple["Membership", Commands]:
        """All that live are ended and started again."""
        everybody = [status.member for status in self.statuses.values() if status.is_there]
        return self._failures(everybody, time, spared=True), (RestartAll(why),)

    def present(self) -> tuple[Member, ...]:
        """The members that a new generation would have: of the workers all of whose processes are ready.

        In an elastic run, all that are ready.
        """
        ready = [process for process, status in self.statuses.items() if status.is_present]
        if self.is_elastic:
            return tuple(self.statuses[process].member for process in sorted(ready))
        whole = whole_workers(self.processes, ready)
        return tuple(self.statuses[process].member for process in sorted(ready) if process.worker in whole)

    @property
    def is_manned(self) -> bool:
        """Whether every stage has a worker that could be a member of a new generation."""
        return not self._unmanned()

    def lost_without(self, processes: Collection[Process]) -> tuple[int, ...]:
        """The stages that nobody would serve without these processes."""
        there = [process for process in self.processes if process not in processes]
        return lost_stages(self.processes, there, is_elastic=self.is_elastic)

    def _unmanned(self) -> tuple[int, ...]:
        present = [member.process for member in self.present()]
        return lost_stages(self.processes, present, is_elastic=self.is_elastic)

    def _with(self, *statuses: ProcessStatus) -> "Membership":
        return replace(self, statuses={**self.statuses, **{status.member.process: status for status in statuses}})

    def _died(self, death: Died) -> tuple["Membership", Commands]:
        member, status = death.member, self.statuses[death.member.process]
        if member != status.member or not status.is_there:
            return self, ()
        # Who is ended with all others, or with its node, is not to blame.
        quick_deaths = 0 if status.lived else status.quick_deaths + (death.is_own and not status.spared)
        dead = self._with(replace(status, state=State.DEAD, is_dying=False, spared=False, quick_deaths=quick_deaths))
        if quick_deaths < self.deadlines.max_quick_deaths:
            return dead, ()
        return dead, (GiveUp(member.process, f"died {quick_deaths} times in a row before it was live: {death.why}"),)

    def _heard(self, message: Message) -> tuple["Membership", Commands]:
        """A dead process that speaks was frozen, cut off or retired: it is ended before it can do harm."""
        member = message.member
        status = self.statuses[member.process]
        if member != status.member or not status.is_there:
            return self, (Kill(member, f"incarnation {member.incarnation} speaks after its death"),)
        status = replace(status, seen=message.time)
        match message:
            case Ready(number=number):
                is_news = status.state is State.STARTING or self._is_under_way(number)
                return self._with(replace(status, state=State.WAITING) if is_news else status), ()
            case Departed():
                return self._with(status)._left(message)
            case Formed():
                return self._with(status)._formed(message), ()
            case Beat():
                return self._progressed(status, message), ()
            case Took():
                return self._with(status)._took(message), ()

    def _is_under_way(self, number: int) -> bool:
        """Whether it is the newest generation, or members should still run the one before."""
        generation = self.generation
        if generation is None:
            return False
        return number == generation.form.number or (generation.form.after is not None and number == self.went)

    def _left(self, left: Departed) -> tuple["Membership", Commands]:
        generation = self.generation
        if generation is None or left.number != generation.form.number or left.member not in generation.staying:
            return self, ()
        generation = replace(generation, since=left.time, left=generation.left | {left.member})
        enter = () if generation.staying else (Enter(generation.form.number, generation.form.members),)
        return replace(self, generation=generation), enter

    def _took(self, took: Took) -> "Membership":
        generation = self.generation
        if took.part != "link" or generation is None or took.number != generation.form.number or generation.is_live:
            return self
        return replace(self, generation=replace(generation, since=took.time, linked=generation.linked | {took.member}))

    def _formed(self, formed: Formed) -> "Membership":
        generation, (member, number, held, time, found) = self.generation, formed
        if generation is None or number != generation.form.number or member not in generation.missing:
            return self
        all_held = {**generation.held, member: held}
        return replace(self, generation=replace(generation, since=time, held=all_held, found=generation.found | found))

    def _progressed(self, status: ProcessStatus, beat: Beat) -> "Membership":
        """A generation under way leaves members to run in the one before only where it waits for an iteration."""
        generation = self.generation
        if generation is None or beat.number != self.went or status.lived != self.went:
            return self._with(status)
        if beat.finished > status.finished and (generation.is_live or generation.form.after is not None):
            generation = replace(generation, since=beat.time)
        updated = self._with(replace(status, entered=beat.entered, finished=beat.finished))
        return replace(updated, generation=generation)

    def _decide(self, time: float) -> tuple["Membership", Commands]:
        undead = [
            status
            for status in self.statuses.values()
            if status.is_dying and time - status.killed > self.deadlines.dying
        ]
        if undead:
            return self._retired(undead)
        overdue = {kill.member: kill for kill in self._overdue(time)}
        if overdue:
            return self._failures(overdue, time), tuple(overdue.values())
        if any(status.is_dying for status in self.statuses.values()):
            return self, ()
        generation = self.generation
        if generation is None:
            return self._form(time) if self._is_assembled(time) else (self, ())
        if self._is_broken(generation):
            return self._form(time)
        return self._decide_live(generation, time) if generation.is_live else self._decide_forming(generation, time)

    def _decide_live(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Who joins waits until all run, so that those who join one by one leave a generation time for something."""
        entered = [status.entered for status in self._statuses_in(generation)]
        if time - generation.since > self.deadlines.progress:
            # Who hangs does not leave, and is found by that; who does not hang keeps its state.
            if self.retried != generation.form.number:
                again, commands = self._form(time)
                return replace(again, retried=again.number), commands
            why = f"nobody finished an iteration for {self.deadlines.progress:g} s, and all are in {entered[0]}"
            return self.restarted(why, time)
        if min(entered) > 0 and set(self.present()) - set(generation.form.members):
            return self._form(time, after=max(entered) + 1)
        return self, ()

    def _decide_forming(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Members that do not come to the iteration which they were given, or not with the others, have to abort."""
        if not generation.missing:
            return self._go(generation, time)
        has_come = any(self.statuses[member.process].lived == self.went for member in generation.left)
        patience = self.deadlines.forming if has_come else self.deadlines.progress
        if self._is_winding_down(generation) and time - generation.since > patience:
            return self._form(time)
        return self, ()

    def _form(self, time: float, after: int | None = None) -> tuple["Membership", Commands]:
        lost = self._unmanned()
        if lost:
            return self._gather(lost, time)
        form = Form(self.number + 1, self.present(), after)
        statuses = [
            replace(status, state=State.FORMING if status.member in form.members else State.WAITING)
            for status in self.statuses.values()
            if status.is_present
        ]
        return replace(self._with(*statuses), generation=Generation(form, time), number=form.number, lost=()), (form,)

    def _gather(self, lost: tuple[int, ...], time: float) -> tuple["Membership", Commands]:
        """Waits for joiners. Nobody leaves the generation: without the stage its members finish no iteration."""
        is_new = not set(lost) <= set(self.lost)
        since = self.since if self.generation is None else time
        statuses = [replace(status, state=State.WAITING) for status in self.statuses.values() if status.is_present]
        gathering = replace(self._with(*statuses), generation=None, since=since, lost=lost)
        return gathering, (StageLost(lost),) if is_new else ()

    def _is_assembled(self, time: float) -> bool:
        """Whether a first generation, or one after a lost stage, need not wait for anybody who is still starting."""
        if time - self.since > self.deadlines.start:
            return True
        states = {status.state for status in self.statuses.values()} - {State.RETIRED}
        return State.STARTING not in states if self.number else states == {State.WAITING}

    def _go(self, generation: Generation, time: float) -> tuple["Membership", Commands]:
        """Lets a generation run. Who was restarted may have found an old state again, which is nobody else's newest."""
        number, statuses = generation.form.number, self._statuses_in(generation)
        live = [
            replace(status, state=State.LIVE, lived=number, quick_deaths=0, entered=0, finished=0)
            for status in statuses
        ]
        gone = replace(self._with(*live), generation=replace(generation, since=time, is_live=True), went=number)
        held_by = {member.process: held for member, held in generation.held.items()}
        if self.is_elastic:
            return gone._elastic_go(generation, Slices(self.cuts, held_by, generation.found))
        stamp = agreed_stamp(self.processes, held_by)
        return gone, (Go(number, stamp, _holders(generation, stamp)),)

    def _elastic_go(self, generation: Generation, slices: Slices) -> tuple["Membership", Commands]:
        number, members, stamp = generation.form.number, generation.form.members, slices.agreed()
        processes = tuple(member.process for member in members)
        if stamp is None:
            return replace(self, cuts=continued(self.cuts, None, number, processes)), (Go(number, None),)
        cut, holders = slices.cut_of(stamp), _holders(generation, stamp)
        assert cut is not None
        is_same = cut.processes == processes and holders == members
        go = Go(number, stamp, holders, None if is_same else cut, not slices.missing(stamp))
        return replace(self, cuts=continued(self.cuts, cut if is_same else None, number, processes)), (go,)

    def _statuses_in(self, generation: Generation) -> tuple[ProcessStatus, ...]:
        return tuple(self.statuses[process] for process, _ in generation.form.members)

    def _is_broken(self, generation: Generation) -> bool:
        """Whether a member has died, or could not go on."""
        return any(
            status.member != member or status.state not in (State.FORMING, State.LIVE)
            for status, member in zip(self._statuses_in(generation), generation.form.members, strict=True)
        )

    def _is_winding_down(self, generation: Generation) -> bool:
        """Whether members still run the generation before, up to an iteration that they were given."""
        running = (self.statuses[process].lived == self.went for process, _ in generation.staying)
        return generation.form.after is not None and any(running)

    def _failures(self, members: Collection[Member], time: float, *, spared: bool = False) -> "Membership":
        """Who is being killed already has no more time to die than it had."""
        statuses = [self.statuses[member.process] for member in members]
        killed = [status.killed if status.is_dying else time for status in statuses]
        return self._with(
            *(
                replace(status, is_dying=True, killed=at, spared=spared)
                for status, at in zip(statuses, killed, strict=True)
            )
        )

    def _retired(self, undead: Collection[ProcessStatus]) -> tuple["Membership", Commands]:
        statuses = [replace(status, state=State.RETIRED, is_dying=False, spared=False) for status in undead]
        why = f"was killed, and has not died in {self.deadlines.dying:g} s"
        return self._with(*statuses), tuple(Retire(status.member, why) for status in statuses)

    def _overdue(self, time: float) -> Iterator[Kill]:
        """Who has to be killed. A generation that somebody has left, or will, is not held against its members."""
        limits, generation = self.deadlines, self.generation
        for status in self.statuses.values():
            if status.state is State.STARTING and not status.is_dying and time - status.seen > limits.start:
                yield Kill(status.member, f"was not ready {limits.start:g} s after its start")
            if status.is_present and time - status.seen > limits.heartbeat:
                yield Kill(status.member, f"was not heard for {limits.heartbeat:g} s")
        if (
            generation is None
            or self._is_broken(generation)
            or any(status.is_dying for status in self._statuses_in(generation))
        ):
            return
        waited = time - generation.since
        if generation.is_live and waited > limits.progress:
            newest = max(status.entered for status in self._statuses_in(generation))
            for status in self._statuses_in(generation):
                if status.entered < newest:
                    yield Kill(status.member, f"is still in iteration {status.entered}, others are in {newest}")
        elif not generation.is_live and not self._is_winding_down(generation):
            for member in generation.staying or generation.missing:
                limit = limits.progress if member in generation.linked else limits.forming
                if waited > limit:
                    yield Kill(member, f"did not form generation {generation.form.number} in {limit:g} s")


def _holders(generation: Generation, stamp: Stamp | None) -> tuple[Member, ...]:
    return tuple(member for member in generation.form.members if stamp in generation.held[member])
