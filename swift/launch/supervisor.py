"""The supervisor: starts the processes of a run, sees them die, and tells those that live what to do.

All decisions are ``swift.mesh.membership``'s. Here is what it decides upon, and what is done about it: processes,
pipes, and the coordination service of every epoch. It is no part of any epoch itself, so that any process may die.
"""

import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from swift.errors import RunError
from swift.launch.chaos import Chaos
from swift.launch.children import Children, Death
from swift.launch.keeper_wire import Failed, Loaded, Saved
from swift.launch.preparer_wire import Trouble, read_said, wish_line
from swift.launch.reporter import Reporter
from swift.launch.saving import KEEPER, Saving
from swift.launch.wire import Command as WireCommand
from swift.launch.wire import (
    Done,
    Enter,
    Halt,
    Hang,
    Leave,
    Left,
    News,
    Order,
    Record,
    Snapshot,
    Stop,
    order_line,
    read_news,
)
from swift.mesh.distributed import Service
from swift.mesh.epochs import (
    Command,
    Deadlines,
    Died,
    Event,
    Form,
    GiveUp,
    Go,
    Kill,
    Member,
    Process,
    RestartAll,
    Stamp,
    Started,
    Tick,
)
from swift.mesh.membership import Membership

Recovery = Literal["live", "restart"]
RECOVERIES: tuple[str, ...] = ("live", "restart")

_PREPARER = "preparer"
_PAUSE_S = 0.02
_HALT_S, _SAVE_S = 8.0, 120.0
_SHOWN_LINES = 20


@dataclass(frozen=True)
class Terms:
    """How a run of processes goes.

    Attributes:
        processes: all that the run has.
        command: that starts one of them.
        logs: each process has a log there, of all its lives.
        deadlines: how long to wait for what.
        recovery: ``live``: survivors stay in their processes; ``restart``: they are started again, too.
        max_restarts: how often a process is started again that was not killed on purpose.
        chaos: what is done to processes on purpose.
        resumed: the run goes on from its newest checkpoint.
    """

    processes: Sequence[Process]
    command: Callable[[Process], Sequence[str]]
    logs: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    recovery: Recovery = "live"
    max_restarts: int = 10
    chaos: Chaos = field(default_factory=Chaos)
    resumed: bool = False


class Supervisor:
    """The processes of a run; a context manager, which leaves none behind.

    Args:
        terms: how the run goes.
        children: where processes are started.
        saving: its checkpoints.
        prepare: the command of the preparer, or None where nothing is prepared.
        reporter: of what happens.
    """

    def __init__(
        self,
        terms: Terms,
        children: Children,
        saving: Saving,
        prepare: Sequence[str] | None,
        reporter: Reporter,
    ):
        self._terms, self._children, self._saving, self._reporter = terms, children, saving, reporter
        self._prepare = prepare
        self._membership = Membership.of(terms.processes, terms.deadlines, time.monotonic())
        self._services: list[Service] = []
        self._left: set[Member] = set()
        self._done: set[Member] = set()
        self._restoring: Go | None = None
        self._restarts: Counter[Process] = Counter()
        self._killed: set[Member] = set()  # on purpose
        self._has_run = terms.resumed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        while self._services:
            self._services.pop(0).close()

    def run(self, is_called_off: Callable[[], bool] = lambda: False) -> None:
        """Until all members of an epoch have run all their iterations, or until it is called off.

        Raises:
            RunError: a process dies again and again, the state is lost, or the loss is not finite any more.
        """
        for process in self._membership.processes:
            self._start(process)
        while not self._is_done() and not is_called_off():
            self._turn()
        if is_called_off():
            self._halt()
        deadline = time.monotonic() + (_HALT_S if is_called_off() else _SAVE_S)
        while self._saving.is_busy and time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        """Hears what has happened, decides, and does it."""
        for who, line, when in self._children.heard(_PAUSE_S):
            if isinstance(who, Member):
                self._hear(read_news(line, who, when))
            elif who == KEEPER:
                self._hear_keeper(line)
            else:
                self._hear_preparer(line)
        for death in self._children.deaths():
            self._mourn(death)
        self._feed(Tick(time.monotonic()))
        self._make_trouble()
        self._reporter.show(self._membership)

    def _is_done(self) -> bool:
        epoch = self._membership.epoch
        return epoch is not None and epoch.is_live and set(epoch.form.members) <= self._done

    def _hear(self, news: News) -> None:
        match news:
            case Left(member, number):
                self._note_left(member, number)
            case Record(record):
                self._reporter.record(record)
                if not math.isfinite(record["loss"]):
                    raise RunError(f"loss = {record['loss']} at iteration {record['step']}: stopped; {self._remedy()}")
            case Snapshot(_, stamp, loss):
                if not math.isfinite(loss):
                    raise RunError(f"loss_after = {loss} at iteration {stamp.step}: stopped; {self._remedy()}")
                self._saving.add(news)
            case Done(member, number):
                if number == self._membership.went:
                    self._done.add(member)
            case _:
                self._feed(news)

    def _hear_keeper(self, line: str) -> None:
        answer = self._saving.hear(line)
        match answer:
            case Saved(step, seconds, path):
                self._reporter.note("checkpoint", step, None, path=path, save_ms=1000 * seconds)
            case Loaded(stamp):
                self._restored(stamp)
            case Failed("save", step, why):
                text = f"the checkpoint of iteration {step} was not saved: {why}"
                self._reporter.note("checkpoint_failed", step or 0, text, error=why)
            case Failed(_, step, why):
                raise RunError(f"the checkpoint of iteration {step} cannot be read: {why}")

    def _hear_preparer(self, line: str) -> None:
        said = read_said(line)
        if isinstance(said, Trouble):
            self._reporter.note("prepare_failed", self._reporter.written, said.why, error=said.why)
        else:
            failed = [f"{pipeline}:{stage}" for pipeline, stage in sorted(said.failed)]
            self._reporter.note("prepared", self._reporter.written, None, failed=failed, seconds=said.seconds)

    def _feed(self, event: Event) -> None:
        before = self._membership
        self._membership, commands = before.on(event)
        self._reporter.on(event, before, self._membership, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Form(_, members, _):
                self._services.append(Service(len(members)))
                self._left, self._done, self._restoring = set(), set(), None
                self._say(members, Order(command, self._services[-1].address))
            case Go():
                # A process whose service ends while it is linked to it is aborted; by now all have left those before.
                while len(self._services) > 1:
                    self._services.pop(0).close()
                self._go(command)
            case Kill(member, _):
                self._children.kill(member)
            case RestartAll():
                self._kill_all([seat.member for seat in self._membership.seats.values()])
            case GiveUp(process, why):
                last = self._log(process).read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
                self._reporter.tell("\n".join([f"the last lines of {self._log(process)}:", *last]))
                raise RunError(f"process {process} {why}: stopped")

    def _note_left(self, member: Member, number: int) -> None:
        epoch = self._membership.epoch
        if epoch is None or number != epoch.form.number:
            return
        self._left.add(member)
        if self._left == set(epoch.form.members):
            self._say(epoch.form.members, Enter(number))

    def _go(self, go: Go) -> None:
        """Lets the members run, from the newest state there is: theirs, or that of a checkpoint."""
        saved = self._saving.newest
        if saved is not None and self._has_run and (go.stamp is None or go.stamp.step < saved):
            self._restoring = go
            self._saving.load(saved, go.number)
        elif go.stamp is None and self._has_run:
            raise RunError(
                "nobody is left who has the state of some stage, and there is no checkpoint: stopped; "
                "start again in another --run-dir"
            )
        else:
            self._let_run(Leave(go, self._reporter.written))

    def _restored(self, stamp: Stamp) -> None:
        go = self._restoring
        if go is not None and go.number == stamp.epoch:
            text = f"all go on from the checkpoint of iteration {stamp.step}"
            self._reporter.note("restore", stamp.step, text, epoch=stamp.epoch)
            self._let_run(Leave(Go(go.number, stamp), self._reporter.written, is_restored=True))

    def _let_run(self, leave: Leave) -> None:
        epoch = self._membership.epoch
        assert epoch is not None
        self._restoring, self._has_run = None, True
        self._say(epoch.form.members, leave)
        self._saving.start()
        if self._prepare is not None:
            if _PREPARER not in self._children:
                self._children.start(_PREPARER, self._prepare, self._terms.logs / "preparer.log")
            there = {member.process.worker for member in epoch.form.members}
            failed = {process.worker for process in self._terms.processes} - there
            self._children.say(_PREPARER, wish_line(frozenset(failed)))

    def _start(self, process: Process) -> None:
        member = Member(process, self._membership.seats[process].member.incarnation + 1)
        self._children.start(member, self._terms.command(process), self._log(process))
        self._feed(Started(member, time.monotonic()))

    def _mourn(self, death: Death) -> None:
        if death.who == KEEPER:
            if not self._saving.died():
                raise RunError("the keeper of checkpoints dies again and again: stopped; see its log")
        elif isinstance(death.who, Member):
            self._restarts[death.who.process] += death.who not in self._killed
            self._feed(Died(death.who, death.time, death.why))
            if self._terms.recovery == "restart":
                self._kill_all([seat.member for seat in self._membership.seats.values() if seat.is_present])

    def _kill_all(self, members: Sequence[Member]) -> None:
        for member in members:
            self._killed.add(member)
            self._children.kill(member)

    def _make_trouble(self) -> None:
        """Does what chaos asks for, and starts again whoever is dead and may come back."""
        newest = max((seat.finished for seat in self._membership.seats.values()), default=0)
        for trouble in self._terms.chaos.harm(newest):
            member = self._membership.seats[trouble.process].member
            if member in self._children:
                self._harm(trouble.kind, member)
        if self._is_recovering():
            return  # the cores are for those who go on; to start a process takes seconds of them
        for process in self._membership.processes:
            is_there = self._membership.seats[process].member in self._children
            is_spent = self._restarts[process] > self._terms.max_restarts
            # Where a stage has nobody no iteration ends any more, and no later one would bring anybody back.
            is_kept_down = not self._membership.lost and self._terms.chaos.keeps_down(process, newest)
            if not is_there and not is_spent and not is_kept_down:
                self._start(process)

    def _is_recovering(self) -> bool:
        """Whether an epoch is being formed, or has not ended an iteration yet."""
        epoch = self._membership.epoch
        if epoch is None:
            return False
        return not epoch.is_live or any(
            self._membership.seats[process].finished == 0 for process, _ in epoch.form.members
        )

    def _harm(self, how: str, member: Member) -> None:
        self._reporter.harmed(member.process, how, time.monotonic())
        self._killed.add(member)
        if how == "hang":
            self._say([member], Hang())
        else:
            self._children.signal(member, signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def _halt(self) -> None:
        """Lets all members end the same iteration and keep their state for a checkpoint."""
        epoch = self._membership.epoch
        if epoch is None or not epoch.is_live or self._restoring is not None:
            return
        after = max(self._membership.seats[process].entered for process, _ in epoch.form.members) + 1
        self._say(epoch.form.members, Halt(after))
        deadline = time.monotonic() + _HALT_S
        while not self._is_done() and time.monotonic() < deadline:
            self._turn()

    def _remedy(self) -> str:
        saved = self._saving.newest
        return "there is no checkpoint" if saved is None else f"--resume goes on from iteration {saved}"

    def _say(self, members: Sequence[Member], order: WireCommand) -> None:
        for member in members:
            self._children.say(member, order_line(order))

    def _stop(self) -> None:
        members = [seat.member for seat in self._membership.seats.values() if seat.member in self._children]
        self._say(members, Stop())
        self._children.wait_for(members)

    def _log(self, process: Process) -> Path:
        return self._terms.logs / f"{str(process).replace(':', '-').replace(' ', '-')}.log"
