"""The driver of the membership: reports what happens to the processes of a run, and carries out what it decides.

Every failure passes through here once: the death of a process comes in as an event, and the commands of the membership
go out to the survivors. All decisions are made in ``swift.elastic.membership``.
"""

import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from swift.elastic.coordinator.checkpoint_client import CHECKPOINT_SERVICE
from swift.elastic.coordinator.run_spec import RunContext
from swift.elastic.coordinator.service_monitor import ServiceMonitor
from swift.elastic.coordinator.worker_results import WorkerResults
from swift.elastic.jax_group import CoordinationService
from swift.elastic.membership.commands import (
    Command,
    Enter,
    Form,
    GiveUp,
    GoLive,
    Kill,
    LeaveOut,
    LoadAhead,
    ReshardState,
    RestartAll,
    RestoreState,
    Retire,
    StageLost,
    StartGeneration,
    StartProcess,
    StopRun,
)
from swift.elastic.membership.events import CheckpointsListed, Died, Event, Message, Started, Tick, Woke
from swift.elastic.membership.members import Member, Process
from swift.elastic.membership.state_machine import Membership
from swift.elastic.transport.compile_messages import CompileRequest
from swift.elastic.transport.multi_node_children import NODES
from swift.elastic.transport.node_messages import NODE_UPDATES, NodeUpdate
from swift.elastic.transport.worker_messages import (
    WORKER_COMMANDS,
    WORKER_MESSAGES,
    Begin,
    FormGroup,
    Halt,
    WorkerCommand,
)
from swift.errors import RunError

_PAUSE_S, _ASLEEP_S = 0.02, 1.0
_NUM_LOG_LINES = 20


class MembershipDriver:
    """Reports events to the membership of a run, and carries out its commands.

    Args:
        context: objects of the run.

    Attributes:
        membership: present membership.
        services: monitor of the checkpoint service and the compile service.
        results: results that workers report.
    """

    def __init__(self, context: RunContext):
        self._context, self._children, self._reporter = context, context.children, context.reporter
        self._ticked = now = time.monotonic()
        spec = context.spec
        self.membership = Membership.of(spec.processes, spec.deadlines, now, spec.policy)
        self.services, self.results = ServiceMonitor(context), WorkerResults(context)
        self._coordination: list[CoordinationService] = []  # of the newest generations
        self._held: dict[Process, Member] = {}

    def close(self) -> None:
        """Ends the coordination services."""
        while self._coordination:
            self._coordination.pop(0).close()

    def turn(self) -> None:
        """Reports all messages, then all deaths; then lets the membership decide, and kills late services."""
        deaths = self._children.deaths()
        for child, line, received in self._children.received(0.0 if deaths else _PAUSE_S):
            self._take(child, line, received)
        for death in deaths:
            if isinstance(death.child, Member):
                self.report(Died(death.child, death.time, death.why, death.is_own))
            else:
                self.services.died(death.child)
        now = time.monotonic()
        if now - self._ticked > _ASLEEP_S:
            self.report(Woke(now))
        self._ticked = now
        self.report(Tick(now))
        if now >= self.membership.holds_until:
            self.services.kill_late(now)

    def report(self, event: Event | None) -> None:
        """Reports an event to the membership, and carries out its commands, with everything that follows from them."""
        events = deque[Event | None]([event])
        while events:
            event, before = events.popleft(), self.membership
            if event is not None:
                self.membership, commands = before.on(event)
                self._reporter.on(event, before, self.membership, commands)
                events.extend([self.carry_out(command) for command in commands])

    def take_from_worker(self, line: str, member: Member, received: float) -> None:
        """Takes a message of a worker, received at this time."""
        message = WORKER_MESSAGES.read(line, member=member, time=received)
        status = self.membership.statuses[member.process]
        is_member = status.member == member and status.is_alive
        event = self.results.take(message) if is_member or isinstance(message, Message) else None
        self.report(event)

    def carry_out(self, command: Command) -> Event | None:
        """Carries out a command of the membership.

        Returns:
            The event to report in answer, if any.

        Raises:
            RunError: the command ends the run.
        """
        checkpoints = self._context.checkpoints
        match command:
            case Form(_, members):
                if not command.stays_connected:
                    self._coordination.append(CoordinationService(len(members), self._context.spec.services))
                self.send(members, FormGroup(command, self._coordination[-1].address))
            case LoadAhead(_, members) | Enter(_, members):
                self.send(members, command)
            case GoLive():
                return self._list_checkpoints()
            case RestoreState(number):
                checkpoints.load(number, self._processes)
            case ReshardState(number, stamp, layout):
                checkpoints.reshard(stamp, layout, number, self._processes)
            case StartGeneration():
                self._start_generation(command)
            case StartProcess(process):
                return self._start_process(process)
            case Kill(member, _):
                self._children.signal(member, signal.SIGKILL)
            case Retire(member, _):
                self._children.abandon(member)
            case RestartAll():
                for status in self.membership.statuses.values():
                    self._children.signal(status.member, signal.SIGKILL)
            case LeaveOut(process, _):  # reading its log here could hold up the run
                self._reporter.show_line(f"the log of process {process} is {self._context.spec.log(str(process))}")
            case GiveUp(process, why):
                self._give_up(process, why)
            case StopRun(why, remedy):
                raise RunError(f"{why}: stopped; {remedy or self._context.remedy}")
            case StageLost():
                pass
        return None

    def hold_ready(self) -> None:
        """Holds ready the process that is to follow each one, which has then imported all that it needs."""
        spec = self._context.spec
        for process, status in self.membership.statuses.items():
            after = Member(process, status.member.incarnation + 1)
            if status.is_alive and self._held.get(process) != after:
                self._held[process] = after
                self._children.hold(after, spec.command(process), spec.log(str(process)))

    def send(self, members: Sequence[Member], command: WorkerCommand) -> None:
        """Sends a command to members."""
        line = WORKER_COMMANDS.line(command)
        for member in members:
            self._children.send(member, line)

    @property
    def _processes(self) -> list[Process]:
        """Processes of the newest generation."""
        assert self.membership.generation is not None
        return [member.process for member in self.membership.generation.form.members]

    def _take(self, child: object, line: str, received: float) -> None:
        """Takes a line of any child."""
        if isinstance(child, Member):
            self.take_from_worker(line, child, received)
        elif child == CHECKPOINT_SERVICE:
            self.report(self.services.take_checkpoint_answer(line, self.membership))
        elif child == NODES:
            change: NodeUpdate = NODE_UPDATES.read(line)
            text = f"node {change.node} {'has joined' if change.is_there else 'is lost'}"
            self._reporter.note("node", self._reporter.written, text, **change._asdict())
        else:
            self.report(self.services.take_compile_answer(line, received))

    def _list_checkpoints(self) -> CheckpointsListed:
        # A process aborts if a service to which it is connected ends; by now all have left the earlier services.
        while len(self._coordination) > 1:
            self._coordination.pop(0).close()
        checkpoints = self._context.checkpoints
        newest, is_full = checkpoints.newest_loadable, checkpoints.newest_is_full
        return CheckpointsListed(time.monotonic(), newest, is_full, checkpoints.is_busy, self._reporter.written)

    def _start_generation(self, command: StartGeneration) -> None:
        membership, processes = self.membership, self._processes
        assert membership.generation is not None
        form = membership.generation.form
        if self.results.unreadable is not None:
            self.send(form.members, Halt(form.number, 0))
        self.send(form.members, command)
        self._context.checkpoints.set_processes(processes, form.number, form.cut)
        self._context.checkpoints.start()
        present = {process.worker for process in processes}
        failed = frozenset(process.worker for process in membership.processes if process.worker not in present)
        num_ranks = len(processes) if membership.policy.is_elastic else None
        seeks_cut = membership.moves.rule is not None
        self._context.programs.request(CompileRequest(failed, num_ranks, form.cut, seeks_cut))

    def _start_process(self, process: Process) -> Started:
        spec, member = self._context.spec, Member(process, self.membership.statuses[process].member.incarnation + 1)
        self._children.start(member, spec.command(process), spec.log(str(process)))
        self.send([member], Begin(self._reporter.written))
        return Started(member, time.monotonic())

    def _give_up(self, process: Process, why: str) -> NoReturn:
        log = self._context.spec.log(str(process))
        if log.exists():  # it does not if the process could not even be started
            last = log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
            self._reporter.show_line("\n".join([f"the last lines of {log}:", *last]))
        raise RunError(f"process {process} {why}: stopped; {self._context.remedy}")
