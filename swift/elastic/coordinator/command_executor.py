"""Execution of what the membership decides: starts and signals processes, sends commands, serves generations."""

import signal
import time
from collections.abc import Sequence
from typing import NoReturn

from swift.elastic.coordinator.checkpoint_client import CheckpointClient, remedy
from swift.elastic.coordinator.compile_client import CompileClient
from swift.elastic.coordinator.run_spec import RunSpec
from swift.elastic.events import Reporter
from swift.elastic.jax_group import CoordinationService
from swift.elastic.membership import (
    Command,
    Enter,
    Event,
    Form,
    GiveUp,
    Go,
    Kill,
    Member,
    Membership,
    Process,
    ReshardState,
    RestartAll,
    RestoreState,
    Retire,
    StageLost,
    Started,
    StartGeneration,
    StartProcess,
    StopRun,
    Stored,
)
from swift.elastic.transport import WORKER_COMMANDS, Children, CompileRequest, FormGroup, Halt, WorkerCommand
from swift.errors import RunError

_SHOWN_LINES = 20


class CommandExecutor:
    """Carries out the commands of the membership, and decides nothing.

    Args:
        run_spec: how the run is executed.
        children: where processes are started.
        saving: the client of the checkpoint service.
        preparing: the client of the compile service.
        reporter: writes what happens.
    """

    def __init__(
        self,
        run_spec: RunSpec,
        children: Children,
        saving: CheckpointClient,
        preparing: CompileClient,
        reporter: Reporter,
    ):
        self._run_spec, self._children, self._reporter = run_spec, children, reporter
        self._saving, self._preparing = saving, preparing
        self._services: list[CoordinationService] = []
        self.runs_iterations = True

    def close(self) -> None:
        """Ends the coordination services."""
        while self._services:
            self._services.pop(0).close()

    def carry_out(self, command: Command, membership: Membership) -> Event | None:
        """Carries out a command.

        Args:
            command: the command.
            membership: the membership that gave it.

        Returns:
            The event to be reported in answer, if any.

        Raises:
            RunError: the command ends the run.
        """
        match command:
            case Form(_, members, _):
                self._services.append(CoordinationService(len(members), self._run_spec.services))
                self.send(members, FormGroup(command, self._services[-1].address))
            case Enter(_, members):
                self.send(members, command)
            case Go():
                return self._go()
            case RestoreState(number):
                self._saving.load(number, _processes(membership))
            case ReshardState(number, stamp, cut):
                self._saving.recut(stamp, cut, number, _processes(membership))
            case StartGeneration():
                self._start_generation(command, membership)
            case StartProcess(process):
                return self._start(process, membership)
            case Kill(member, _):
                self._children.signal(member, signal.SIGKILL)
            case Retire(member, _):
                self._children.abandon(member)
            case RestartAll():
                for status in membership.statuses.values():
                    self._children.signal(status.member, signal.SIGKILL)
            case GiveUp(process, why):
                self._give_up(process, why)
            case StopRun(why, what_to_do):
                raise RunError(f"{why}: stopped; {what_to_do or remedy(self._saving.newest)}")
            case StageLost():
                pass
        return None

    def send(self, members: Sequence[Member], command: WorkerCommand) -> None:
        """Sends a command to members."""
        line = WORKER_COMMANDS.line(command)
        for member in members:
            self._children.say(member, line)

    def _go(self) -> Stored:
        # A process whose service ends while it is linked to it is aborted; by now all have left those before.
        while len(self._services) > 1:
            self._services.pop(0).close()
        newest, is_full = self._saving.newest, self._saving.newest_is_full
        return Stored(time.monotonic(), newest, is_full, self._saving.is_busy, self._reporter.written)

    def _start_generation(self, command: StartGeneration, membership: Membership) -> None:
        generation = membership.generation
        assert generation is not None
        if not self.runs_iterations:
            self.send(generation.form.members, Halt(generation.form.number, 0))
        self.send(generation.form.members, command)
        processes = _processes(membership)
        self._saving.set_processes(processes)
        self._saving.start()
        there = {process.worker for process in processes}
        failed = frozenset(process.worker for process in membership.processes if process.worker not in there)
        self._preparing.ask(CompileRequest(failed, len(processes) if membership.policy.is_elastic else None))

    def _start(self, process: Process, membership: Membership) -> Started:
        member = Member(process, membership.statuses[process].member.incarnation + 1)
        self._children.start(member, self._run_spec.command(process), self._run_spec.log(str(process)))
        return Started(member, time.monotonic())

    def _give_up(self, process: Process, why: str) -> NoReturn:
        log = self._run_spec.log(str(process))
        if log.exists():  # else it could not even be started
            last = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            self._reporter.tell("\n".join([f"the last lines of {log}:", *last]))
        raise RunError(f"process {process} {why}: stopped; {remedy(self._saving.newest)}")


def _processes(membership: Membership) -> list[Process]:
    assert membership.generation is not None
    return [member.process for member in membership.generation.form.members]
