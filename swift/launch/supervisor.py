"""The supervisor: starts the processes of a run, sees them die, and tells those that live what to do.

All decisions are ``swift.mesh.membership``'s. Here is what it decides upon, and what is done about it: processes,
pipes, and the coordination service of every epoch. It is no part of any epoch itself, so that any process may die.
"""

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from swift.errors import RunError
from swift.launch.chaos import Chaos
from swift.launch.wire import Done, Order, Stop, order_line, read_message
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
    StageLost,
    Started,
    Tick,
)
from swift.mesh.membership import Membership

_PAUSE_S = 0.02
_STOP_S = 10.0
_SHOWN_LINES = 20


@dataclass
class _Child:
    member: Member
    popen: subprocess.Popen[str]


class Supervisor:
    """The processes of a run; a context manager, which leaves none behind.

    Args:
        processes: all that the run has.
        command: of a process.
        environment: of all.
        log_dir: each process has a log there, of all its lives.
        deadlines: how long to wait for what.
        chaos: what is done to processes on purpose.
        tell: called with a line for each event.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        command: Callable[[Process], Sequence[str]],
        environment: Mapping[str, str],
        log_dir: Path,
        deadlines: Deadlines,
        chaos: Chaos,
        tell: Callable[[str], None],
    ):
        self._command, self._environment, self._log_dir = command, dict(environment), log_dir
        self._chaos, self._tell = chaos, tell
        self._membership = Membership.of(processes, deadlines, time.monotonic())
        self._children: dict[Process, _Child] = {}
        self._heard: SimpleQueue[tuple[Member, str, float]] = SimpleQueue()
        self._services: list[Service] = []
        self._done: set[Member] = set()
        self._has_run = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._close_services(but=0)

    def run(self, is_called_off: Callable[[], bool] = lambda: False) -> None:
        """Until all members of an epoch have run all their iterations, or until it is called off.

        Raises:
            RunError: a process dies again and again, or the state is lost.
        """
        for process in self._membership.processes:
            self._start(process)
        while not self._is_done() and not is_called_off():
            events: list[Event] = [*self._listen(), *self._deaths()]
            for event in [*events, Tick(time.monotonic())]:
                self._feed(event)
            self._make_trouble()

    def _is_done(self) -> bool:
        epoch = self._membership.epoch
        return epoch is not None and epoch.is_live and set(epoch.form.members) <= self._done

    def _feed(self, event: Event) -> None:
        self._membership, commands = self._membership.on(event)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Form(number, members, _):
                self._services.append(Service(len(members)))
                self._say(members, order_line(Order(command, self._services[-1].address)))
                self._tell(f"epoch {number}: {len(members)} processes form")
            case Go(number, step, _):
                if step is None and self._has_run:
                    raise RunError(
                        "nobody is left who has the state of some stage, and there is no checkpoint: stopped; "
                        "start again in another --run-dir"
                    )
                self._has_run = True
                assert self._membership.epoch is not None
                self._close_services(but=1)  # everybody has left those before
                self._say(self._membership.epoch.form.members, order_line(command))
                self._tell(f"epoch {number}: goes on after iteration {step or 0}")
            case Kill(member, why):
                self._tell(f"process {member.process} is killed: {why}")
                self._kill(member)
            case RestartAll(why):
                self._tell(f"all processes are started again: {why}")
                for child in list(self._children.values()):
                    self._kill(child.member)
            case StageLost(stages):
                self._tell(f"stages {stages} have no process left")
            case GiveUp(process, why):
                last = self._log(process).read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
                self._tell("\n".join([f"the last lines of {self._log(process)}:", *last]))
                raise RunError(f"process {process} {why}: stopped")

    def _start(self, process: Process) -> None:
        incarnation = self._membership.seats[process].member.incarnation + 1
        member = Member(process, incarnation)
        with self._log(process).open("ab") as log:
            popen = subprocess.Popen(
                self._command(process),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the supervisor, which tells them
            )
        self._children[process] = _Child(member, popen)
        threading.Thread(target=self._hear, args=(member, popen), daemon=True).start()
        self._feed(Started(member, time.monotonic()))

    def _hear(self, member: Member, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        with popen.stdout:
            for line in popen.stdout:
                self._heard.put((member, line, time.monotonic()))

    def _listen(self) -> list[Event]:
        """What was said since the last time; waits a moment where nothing was."""
        events: list[Event] = []
        with suppress(Empty):
            heard = self._heard.get(timeout=_PAUSE_S)
            while True:
                message = read_message(heard[1], heard[0], heard[2])
                if isinstance(message, Done):
                    self._done.add(message.member)
                else:
                    events.append(message)
                heard = self._heard.get_nowait()
        return events

    def _deaths(self) -> list[Event]:
        events: list[Event] = []
        for process, child in list(self._children.items()):
            code = child.popen.poll()
            if code is not None:
                self._bury(child)
                del self._children[process]
                why = f"signal {-code}" if code < 0 else f"exit code {code}"
                self._tell(f"process {process} died ({why})")
                events.append(Died(child.member, time.monotonic(), why))
        return events

    def _make_trouble(self) -> None:
        """Does what chaos asks for, and starts again whoever is dead and may come back."""
        newest = max((seat.finished for seat in self._membership.seats.values()), default=0)
        for process in self._chaos.to_kill(newest):
            if process in self._children:
                self._kill(self._children[process].member)
        for process in self._membership.processes:
            if process not in self._children and not self._chaos.keeps_down(process, newest):
                self._start(process)

    def _say(self, members: Sequence[Member], line: str) -> None:
        for member in members:
            child = self._children.get(member.process)
            if child is not None and child.member == member and child.popen.stdin is not None:
                with suppress(BrokenPipeError):  # its death is on its way
                    child.popen.stdin.write(line)
                    child.popen.stdin.flush()

    def _kill(self, member: Member) -> None:
        child = self._children.get(member.process)
        if child is not None and child.member == member:
            child.popen.kill()

    def _bury(self, child: _Child) -> None:
        if child.popen.stdin is not None:
            with suppress(BrokenPipeError):
                child.popen.stdin.close()

    def _close_services(self, but: int) -> None:
        """Closes all services but the newest; a process whose service ends while it is linked to it is aborted."""
        while len(self._services) > but:
            self._services.pop(0).close()

    def _stop(self) -> None:
        self._say([child.member for child in self._children.values()], order_line(Stop()))
        deadline = time.monotonic() + _STOP_S
        for child in self._children.values():
            try:
                child.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.popen.kill()
                child.popen.wait()
            self._bury(child)
        self._children.clear()

    def _log(self, process: Process) -> Path:
        return self._log_dir / f"{str(process).replace(':', '-').replace(' ', '-')}.log"
