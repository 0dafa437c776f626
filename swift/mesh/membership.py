"""Who is a member of a run of real processes: the state machine of the one authority, the supervisor.

The supervisor outlives the workers, so nobody has to agree with anybody: it decides, and workers obey. It tells
``Membership.on`` all that it sees, then a ``Tick``, and carries out the commands that come back, in their order. Deaths
that are told before the same ``Tick`` cost one epoch together, and a heartbeat that waited in a queue is not missed.

An epoch has two phases. ``Form`` takes every member out of the epoch before; only when all have answered, ``Go`` lets
them run. Who may still run is never left out of an epoch: it is killed, and the epoch waits until it has died.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from swift.mesh.epochs import (
    Beat,
    Command,
    Deadlines,
    Died,
    Event,
    Form,
    Formed,
    GiveUp,
    Go,
    Kill,
    Member,
    Message,
    Process,
    Ready,
    RestartAll,
    StageLost,
    Started,
    Tick,
    agreed_step,
    lost_stages,
    whole_workers,
)


class State(StrEnum):
    """What a process does, as far as the supervisor knows."""

    DEAD = "dead"
    STARTING = "starting"
    WAITING = "waiting"
    FORMING = "forming"
    LIVE = "live"


@dataclass(frozen=True)
class Seat:
    """What is known of a process.

    Attributes:
        member: its newest incarnation; -1 if it was never started.
        state: what that does.
        seen: when it was started or last heard of.
        doomed: whether it is being killed.
        lived: the newest epoch that it was live in; 0: none.
        quick_deaths: how many incarnations in a row, up to the last that died, were never live.
        entered: the newest iteration that it has begun in the newest live epoch; 0: none yet.
        finished: the newest that it has ended there.
    """

    member: Member
    state: State = State.DEAD
    seen: float = 0.0
    doomed: bool = False
    lived: int = 0
    quick_deaths: int = 0
    entered: int = 0
    finished: int = 0

    @property
    def is_present(self) -> bool:
        """Whether it can be a member of the next epoch."""
        return self.state not in (State.DEAD, State.STARTING) and not self.doomed


@dataclass(frozen=True)
class Epoch:
    """The newest epoch.

    Attributes:
        form: the command that began it.
        since: when something last went on: it began, or went; an iteration was finished, by members that run.
        held: what the members that have formed have answered.
        is_live: whether it has gone.
    """

    form: Form
    since: float
    held: Mapping[Member, frozenset[int]] = field(default_factory=dict)
    is_live: bool = False

    @property
    def missing(self) -> tuple[Member, ...]:
        """The members that have not answered yet."""
        return tuple(member for member in self.form.members if member not in self.held)


@dataclass(frozen=True)
class Membership:
    """The membership of a run at one moment; it is never changed, ``on`` returns the next.

    Attributes:
        processes: all that the run may have, of all stages.
        deadlines: how long to wait for what.
        seats: what is known of every process.
        since: when the run began, or its epoch ended for want of a stage.
        epoch: None while there is none: at the beginning, and while a stage has nobody.
        number: the newest epoch that was ever formed.
        went: the newest that was ever live.
        lost: the stages that have been told to be lost since the last epoch.
    """

    processes: tuple[Process, ...]
    deadlines: Deadlines
    seats: Mapping[Process, Seat]
    since: float
    epoch: Epoch | None = None
    number: int = 0
    went: int = 0
    lost: tuple[int, ...] = ()

    @classmethod
    def of(cls, processes: Sequence[Process], deadlines: Deadlines, time: float) -> "Membership":
        """The membership of a run none of whose processes has been started yet."""
        return cls(tuple(processes), deadlines, {process: Seat(Member(process, -1)) for process in processes}, time)

    def on(self, event: Event) -> tuple["Membership", tuple[Command, ...]]:
        """The membership after an event, and what the supervisor has to do.

        Only a ``Tick`` moves the epoch. The other events are remembered; they may ask for the end of a process that
        should not be there, or of the run.
        """
        match event:
            case Tick(time):
                return self._decide(time)
            case Started(member, time):
                seat = self.seats[member.process]
                assert seat.state is State.DEAD, f"{member.process} is started again while it lives"
                assert member.incarnation > seat.member.incarnation, "an incarnation comes back"
                return self._seated(Seat(member, State.STARTING, time, quick_deaths=seat.quick_deaths)), ()
            case Died(member, _, why):
                return self._died(member, why)
            case _:
                return self._heard(event)

    def present(self) -> tuple[Member, ...]:
        """The members that a new epoch would have: of the workers all of whose processes are ready."""
        ready = [process for process, seat in self.seats.items() if seat.is_present]
        whole = whole_workers(self.processes, ready)
        return tuple(self.seats[process].member for process in sorted(ready) if process.worker in whole)

    @property
    def is_manned(self) -> bool:
        """Whether every stage has a worker that could be a member of a new epoch."""
        return not self._unmanned()

    def _unmanned(self) -> tuple[int, ...]:
        return lost_stages(self.processes, [member.process for member in self.present()])

    def _seated(self, *seats: Seat) -> "Membership":
        return replace(self, seats={**self.seats, **{seat.member.process: seat for seat in seats}})

    def _died(self, member: Member, why: str) -> tuple["Membership", tuple[Command, ...]]:
        seat = self.seats[member.process]
        if member != seat.member or seat.state is State.DEAD:
            return self, ()
        quick_deaths = 0 if seat.lived else seat.quick_deaths + 1
        dead = self._seated(replace(seat, state=State.DEAD, doomed=False, quick_deaths=quick_deaths))
        if quick_deaths < self.deadlines.max_quick_deaths:
            return dead, ()
        return dead, (GiveUp(member.process, f"died {quick_deaths} times in a row before it was live: {why}"),)

    def _heard(self, message: Message) -> tuple["Membership", tuple[Command, ...]]:
        """A dead process that speaks was frozen, or cut off: it is ended before it can do harm."""
        member = message.member
        seat = self.seats[member.process]
        if member != seat.member or seat.state is State.DEAD:
            return self, (Kill(member, f"incarnation {member.incarnation} speaks after its death"),)
        if seat.doomed:
            return self, ()
        seat = replace(seat, seen=message.time)
        match message:
            case Ready(number=number):
                is_news = seat.state is State.STARTING or (self.epoch is not None and number == self.epoch.form.number)
                return self._seated(replace(seat, state=State.WAITING) if is_news else seat), ()
            case Formed(_, number, held, time):
                return self._seated(seat)._formed(member, number, held, time), ()
            case Beat():
                return self._progressed(seat, message), ()

    def _formed(self, member: Member, number: int, held: frozenset[int], time: float) -> "Membership":
        epoch = self.epoch
        if epoch is None or number != epoch.form.number or member not in epoch.missing:
            return self
        since = epoch.since if epoch.form.after is None else time
        return replace(self, epoch=replace(epoch, since=since, held={**epoch.held, member: held}))

    def _progressed(self, seat: Seat, beat: Beat) -> "Membership":
        """An epoch under way leaves members to run in the one before only where it waits for an iteration."""
        epoch = self.epoch
        if epoch is None or beat.number != self.went or seat.lived != self.went:
            return self._seated(seat)
        if beat.finished > seat.finished and (epoch.is_live or epoch.form.after is not None):
            epoch = replace(epoch, since=beat.time)
        seated = self._seated(replace(seat, entered=beat.entered, finished=beat.finished))
        return replace(seated, epoch=epoch)

    def _decide(self, time: float) -> tuple["Membership", tuple[Command, ...]]:
        overdue = {kill.member: kill for kill in self._overdue(time)}
        if overdue:
            return self._doomed(overdue), tuple(overdue.values())
        if any(seat.doomed for seat in self.seats.values()):
            return self, ()
        epoch = self.epoch
        if epoch is None:
            return self._form(time) if self._is_assembled(time) else (self, ())
        if any(self._has_left(member) for member in epoch.form.members):
            return self._form(time)
        return self._decide_live(epoch, time) if epoch.is_live else self._decide_forming(epoch, time)

    def _decide_live(self, epoch: Epoch, time: float) -> tuple["Membership", tuple[Command, ...]]:
        """Who joins waits until all have begun to run, so that a joining epoch always lets the last one do something."""
        entered = [self._seat(member).entered for member in epoch.form.members]
        if time - epoch.since > self.deadlines.progress:
            everybody = [seat.member for seat in self.seats.values() if seat.state is not State.DEAD]
            why = f"no iteration was finished for {self.deadlines.progress:g} s, and all are in iteration {entered[0]}"
            return self._doomed(everybody), (RestartAll(why),)
        if min(entered) > 0 and set(self.present()) - set(epoch.form.members):
            return self._form(time, after=max(entered) + 1)
        return self, ()

    def _decide_forming(self, epoch: Epoch, time: float) -> tuple["Membership", tuple[Command, ...]]:
        if not epoch.missing:
            return self._go(epoch, time)
        if self._is_winding_down(epoch) and time - epoch.since > self.deadlines.progress:
            return self._form(time)
        return self, ()

    def _overdue(self, time: float) -> Iterator[Kill]:
        """Who has to be killed; of an epoch that somebody has left, which is about to end, only those not heard."""
        limits, epoch = self.deadlines, self.epoch
        for seat in self.seats.values():
            if seat.state is State.STARTING and time - seat.seen > limits.start:
                yield Kill(seat.member, f"was not ready {limits.start:g} s after its start")
            if seat.is_present and time - seat.seen > limits.heartbeat:
                yield Kill(seat.member, f"was not heard for {limits.heartbeat:g} s")
        if epoch is None or any(seat.doomed or self._has_left(seat.member) for seat in self._seats_in(epoch)):
            return
        waited = time - epoch.since
        if epoch.is_live and waited > limits.progress:
            newest = max(seat.entered for seat in self._seats_in(epoch))
            for seat in self._seats_in(epoch):
                if seat.entered < newest:
                    yield Kill(seat.member, f"is still in iteration {seat.entered}, others are in {newest}")
        elif not epoch.is_live and not self._is_winding_down(epoch) and waited > limits.forming:
            for member in epoch.missing:
                yield Kill(member, f"did not form epoch {epoch.form.number} in {limits.forming:g} s")
