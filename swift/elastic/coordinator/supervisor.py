"""The supervisor: starts the processes of a run, carries it through failures, and stops it cleanly.

The supervisor is not a member of any generation, so any member may die. ``RunSpec`` has the settings that are fixed
before the run begins, and ``RunContext`` the objects that the supervisor works with.

Every failure passes through ``_MembershipDriver``, which reports the death of a process to ``swift.elastic.membership``
as an event, and carries out the commands that this decides on. ``WorkerResults`` handles the other messages of workers:
records of iterations, plans, and snapshots to be saved. ``ServiceMonitor`` handles the answers of the two services, and
kills a service that is late. ``_StopPlan`` chooses the iteration after which a run stops.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

from swift.checkpoint import saver
from swift.deadlines import Deadlines
from swift.elastic.coordinator.fault_injection import Fault, FaultInjection
from swift.elastic.coordinator.service_clients import (
    CHECKPOINT_SERVICE,
    COMPILE_SERVICE,
    CheckpointClient,
    CompileClient,
)
from swift.elastic.jax_group import CoordinationService
from swift.elastic.membership.messages import (
    AbortRun,
    ActivateGeneration,
    CheckpointsListed,
    ClockJumped,
    Command,
    Connect,
    Died,
    Event,
    ExcludeProcess,
    FaultInjected,
    FormGeneration,
    Kill,
    MayRestart,
    Member,
    Message,
    PreloadPrograms,
    Process,
    Ready,
    RecutReady,
    ReshardState,
    RestartAll,
    Restored,
    RestoreFailed,
    RestoreState,
    Retire,
    StageLost,
    Started,
    StartGeneration,
    StartProcess,
    StopRequested,
    StopRun,
    Tick,
)
from swift.elastic.membership.state_machine import Membership
from swift.elastic.membership.status import ProcessState, RecoveryPolicy
from swift.elastic.reporting.journal import reshard_text
from swift.elastic.reporting.reporter import Reporter
from swift.elastic.state.run_files import DirectoryMender
from swift.elastic.transport.children import Children
from swift.elastic.transport.messages import (
    NODE_UPDATES,
    WORKER_COMMANDS,
    WORKER_MESSAGES,
    Begin,
    CommandFailed,
    CompileFailed,
    CompileRequest,
    CutPrepared,
    DataUnreadable,
    FormGroup,
    Halt,
    Hang,
    KeptElsewhere,
    NodeUpdate,
    Planned,
    Record,
    Saved,
    SnapshotKept,
    SnapshotMissed,
    StateRestored,
    Stop,
    WorkerCommand,
    WorkerMessage,
)
from swift.elastic.transport.nodes import NODES
from swift.errors import RunError
from swift.mesh.process_group import LOOPBACK
from swift.topology import worker_names

_DELIVERY_S = 1.0
"""Upper bound on the time until all members have received a command, in seconds."""
_NUM_TIMED = 10
"""Number of recent iterations; the fastest of them gives the duration of an iteration, since others may have waited."""

_PAUSE_S, _ASLEEP_S = 0.02, 1.0
_NUM_LOG_LINES = 20
_DATA_REMEDY = "once the data are repaired"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Settings of a run that are fixed before it begins.

    Attributes:
        processes: all processes of the run.
        command: returns the command line that starts a process.
        logs: directory for logs; all incarnations of a process share one log.
        deadlines: time limits.
        policy: settings of recovery from failures.
        faults: faults to be injected.
        services: socket directory or address of coordination services, see ``CoordinationService``.
    """

    processes: Sequence[Process]
    command: Callable[[Process], Sequence[str]]
    logs: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    faults: FaultInjection = field(default_factory=FaultInjection)
    services: Path | str = LOOPBACK

    def log(self, name: str) -> Path:
        """Returns the path of a process's log."""
        return self.logs / f"{name.replace(':', '-').replace(' ', '-')}.log"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The settings and objects that the supervisor of a run works with.

    Attributes:
        spec: settings of the run.
        children: child processes: workers and services.
        checkpoints: client of the checkpoint service.
        programs: client of the compile service.
        reporter: writes to the run directory and to the terminal.
        mend: restores directories of the run that were removed, see ``RunFiles``.
    """

    spec: RunSpec
    children: Children
    checkpoints: CheckpointClient
    programs: CompileClient
    reporter: Reporter
    mend: Callable[[], bool] = lambda: False

    @property
    def remedy(self) -> str:
        """Advice to the user on how to continue the run once it has stopped."""
        newest = self.checkpoints.newest
        if newest is None:
            return "there is no checkpoint; start again in another --run-dir"
        return f"resume from the checkpoint of iteration {newest} with --resume"


class ServiceMonitor:
    """Handles the answers of the two services, kills them if they are late, and restarts them after their death.

    Args:
        context: settings and objects of the run.

    Attributes:
        saved: iteration of the last checkpoint; 0 if none was saved.
        failure: message to the user about the last failed save; empty once a save has succeeded.
    """

    def __init__(self, context: RunContext):
        self._context, self._reporter = context, context.reporter
        self._killed: dict[Hashable, float] = {}  # services that were killed and have not died, and when
        self.saved = 0
        self.failure = ""

    def take_checkpoint_answer(self, line: str, membership: Membership) -> Event | None:
        """Handles an answer of the checkpoint service; returns an event for the membership, or None."""
        answer = self._context.checkpoints.take_answer(line)
        match answer:
            case Saved(step, seconds, path, facts):
                self.saved, self.failure = step, ""
                self._reporter.note("checkpoint", step, None, path=path, save_ms=1000 * seconds, **facts)
                self._reporter.saved(step)
            case KeptElsewhere(_, text):
                self.failure = text
            case StateRestored():
                return self._restored(answer, membership)
            case saver.FailureReport(request, reason):
                self.failure = answer.line
                self._reporter.note("checkpoint_failed", request.step, answer.line, error=reason)
            case CommandFailed("reshard", step, reason, generation):
                lost = f"the state after iteration {step} is lost: {reason}"
                return RestoreFailed(generation, time.monotonic(), lost)
            case CommandFailed(_, step, reason, generation):
                which = "there is no checkpoint" if step is None else f"that of iteration {step} cannot be read"
                lost = f"the state is lost, and {which}"
                return RestoreFailed(generation, time.monotonic(), lost, reason)
        return None

    def take_compile_answer(self, line: str, time: float) -> RecutReady | None:
        """Handles a message of the compile service; returns an event for the membership, or None.

        Args:
            line: the message.
            time: when it was received, in seconds.
        """
        answer, written = self._context.programs.take_answer(line, time), self._reporter.written
        if answer is None:
            return None
        if isinstance(answer, CompileFailed):
            self._reporter.note("compile_failed", written, answer.reason, error=answer.reason)
            return None
        failed = worker_names(answer.failed)
        if isinstance(answer, CutPrepared):
            cut_facts = {"cuts": answer.cut.cuts, "positions": answer.cut.positions}
            more = cut_facts | {"microbatches": answer.microbatches, "gain": answer.gain}
            self._reporter.note("compiled", written, None, failed=failed, seconds=answer.seconds, **more)
            return RecutReady(time, answer.failed, answer.cut, answer.gain, answer.most_bytes)
        ranks = {} if answer.num_ranks is None else {"ranks": answer.num_ranks}
        self._reporter.note("compiled", written, None, failed=failed, seconds=answer.seconds, **ranks)
        return None

    def tick(self, now: float, *, has_slept: bool) -> None:
        """Sends requests that are due, kills services that are late, and replaces killed services that do not die.

        Args:
            now: current time, in seconds.
            has_slept: whether the machine was asleep, so that answers may be unread: nothing is killed.
        """
        written, limits = self._reporter.written, self._context.spec.deadlines
        if saver.WriterAction.KILL in self._context.checkpoints.tick(has_slept=has_slept):
            reason = f"did not answer for {limits.saving:g} s"
            text = f"the checkpoint service {reason}: killed"
            self._reporter.note("process_killed", written, text, process=CHECKPOINT_SERVICE, reason=reason)
            self._killed[CHECKPOINT_SERVICE] = now
        if has_slept:
            return
        if self._context.programs.kill_if_silent():
            reason = "sent no heartbeat in time"
            self._reporter.note("process_killed", written, None, process=COMPILE_SERVICE, reason=reason)
            self._killed[COMPILE_SERVICE] = now
        for service in [name for name, killed in self._killed.items() if now - killed > limits.dying]:
            self._context.children.abandon(service)
            self.died(service)

    def died(self, service: Hashable) -> None:
        """Restarts a service after its death; raises RunError if the run cannot continue without it."""
        self._killed.pop(service, None)
        checkpoints = self._context.checkpoints
        if service == CHECKPOINT_SERVICE and saver.WriterAction.GIVE_UP in checkpoints.on(saver.WriterDied()):
            reason = f"the checkpoint service has died too often, see {self._context.spec.log(CHECKPOINT_SERVICE)}"
            raise RunError(f"{reason}: stopped; {self._context.remedy}")
        if service == COMPILE_SERVICE and not self._context.programs.died():
            log = self._context.spec.log(COMPILE_SERVICE)
            reason = f"the compile service has died too often, see {log}: no more programs are compiled"
            self._reporter.note("compile_failed", self._reporter.written, reason, error=reason)

    def _restored(self, answer: StateRestored, membership: Membership) -> Restored | None:
        stamp, facts = answer.stamp, answer.facts
        if not membership.awaits_state(stamp.generation):
            return None
        if answer.is_resharded:
            event, text = "reshard", reshard_text(facts["ranks"], facts["ranks_before"], stamp.step)
        elif answer.is_origin:
            event, text = "init_from", "begins with the weights of {run}, iteration {of_step}".format(**facts)
        else:
            event, text = "restore", f"all resume from the checkpoint of iteration {stamp.step}"
            self._reporter.saved(stamp.step)
        self._reporter.note(event, stamp.step, "\n".join([text, *answer.lines]), generation=stamp.generation, **facts)
        return Restored(stamp, time.monotonic(), self._reporter.written)


class _StopPlan:
    """Chooses the last iteration of a run that is to stop, late enough for all members to stop after it."""

    def __init__(self) -> None:
        self._steps_s = deque([_DELIVERY_S], maxlen=_NUM_TIMED)  # durations of the newest iterations
        self._halted = self._last = 0  # newest generation that was halted; its last iteration

    def record(self, step_s: float) -> None:
        """Records the duration of an iteration, in seconds."""
        self._steps_s.append(step_s)

    def halt(self, membership: Membership) -> Halt | None:
        """Returns the command that stops the running generation, or None if it was sent already or none is running."""
        generation = membership.generation
        if (
            generation is None
            or generation.restoring
            or membership.is_recovering
            or self._halted == generation.form.number
        ):
            return None
        entered = max(status.entered for status in membership.members_of(generation))
        # All members have to finish the same iteration: choose one that none can have passed when the command arrives.
        self._last = entered + max(1, math.ceil(_DELIVERY_S / max(min(self._steps_s), 1e-3)))
        self._halted = generation.form.number
        return Halt(self._halted, self._last)

    def awaited(self, membership: Membership, written: int, saved: int, *, is_busy: bool) -> str:
        """Returns a text on what a stopping run still waits for; empty once everything that can be saved is saved.

        Args:
            membership: current membership.
            written: last iteration whose record has been written.
            saved: iteration of the last checkpoint.
            is_busy: whether the checkpoint service has unfinished requests.
        """
        is_saving = is_busy and not membership.is_loading
        if membership.is_done or (self._halted and is_saving):
            return "the checkpoint" if is_saving else ""
        # Without a checkpoint, a stage whose state proved to be gone would be an error rather than a stop.
        is_lost = membership.has_lost_stages and not (saved and _may_return(membership))
        if written <= saved or membership.is_loading or is_lost:
            return ""
        if self._halted == membership.last_live == membership.number:
            return f"iteration {self._last}, which is to be the last"
        return f"all processes to run after a failure; iteration {written} is not saved yet"


def _may_return(membership: Membership) -> bool:
    """Returns whether, for each lost stage, a process that may have kept its state is being restarted."""
    alive = {process.worker[1] for process, status in membership.statuses.items() if status.is_alive}
    return set(membership.unserved_stages) <= alive


class WorkerResults:
    """Checks the results of workers, writes their records, and passes their snapshots to the checkpoint service.

    Args:
        context: settings and objects of the run.

    Attributes:
        last_iteration: chooses the last iteration of a run that is to stop.
        is_stopping: whether the run is to stop; checkpoints requested from then on contain all experts.
        unreadable: first report of data that cannot be read; from then on no generation runs iterations.
        missed: newest report of a snapshot that a member could not store.
    """

    def __init__(self, context: RunContext):
        self._context, self._reporter = context, context.reporter
        self.last_iteration = _StopPlan()
        self.is_stopping = False
        self.unreadable: DataUnreadable | None = None
        self.missed: SnapshotMissed | None = None

    def take(self, message: WorkerMessage) -> Event | None:
        """Handles a message of a worker; returns an event for the membership, or None if there is none.

        Raises:
            RunError: the message ends the run.
        """
        if isinstance(message, Message):
            return message
        match message:
            case Record(record):
                self._take_record(record)
            case Planned(number, facts):
                self._reporter.plan(number, facts)
            case SnapshotKept(_, stamp, loss):
                if loss is not None:
                    self._check_finite(stamp.step, loss_after=loss)
                self._context.checkpoints.add(message, is_full=self.is_stopping)
            case SnapshotMissed(_, stamp, reason):
                self.missed = message
                self._reporter.note("checkpoint_failed", stamp.step, _missed_text(message), error=reason)
            case DataUnreadable():
                return self._take_unreadable(message)
        return None

    def check_ended(self) -> None:
        """Raises RunError if the run ended because of unreadable data, or could not save its newest state."""
        if self.unreadable is not None and not self.is_stopping:
            raise self._unreadable_error(self.unreadable)
        if self.missed is not None and self.missed.stamp.step > (self._context.checkpoints.newest or 0):
            raise RunError(f"{_missed_text(self.missed)}: stopped; {self._context.remedy}")

    def _take_record(self, record: dict[str, Any]) -> None:
        step, flaw = record["step"], record.get("invalid_placement")
        if flaw is not None:
            self._reporter.note("invalid_placement", step, None, reason=flaw)
            what = f"Experiment.placement: {flaw} at iteration {step}"
            raise RunError(f"{what}: stopped; correct the policy and {self._context.remedy}")
        self._check_finite(step, loss=record["loss"], grad_norm=record["grad_norm"])
        self.last_iteration.record(record["step_ms"] / 1000)
        self._reporter.record(record)

    def _check_finite(self, step: int, **measured: float) -> None:
        """Raises RunError if a measured value of an iteration is not finite."""
        if all(map(math.isfinite, measured.values())):
            return
        self._reporter.note("non_finite", step, None, **measured)
        values = ", ".join(f"{name} = {value}" for name, value in measured.items())
        raise RunError(f"{values} at iteration {step}: stopped; {self._context.remedy}")

    def _take_unreadable(self, message: DataUnreadable) -> Ready:
        """Begins to end the run after a data error: one more generation saves the common state, without training.

        Returns:
            An event that makes the membership form that generation.
        """
        if self.unreadable is None:
            self.unreadable = message
            self._reporter.note("data_unreadable", self._reporter.written, message.reason, error=message.reason)
        elif message.number > self.unreadable.number:  # the saving generation failed, too: even a save needs the data
            raise self._unreadable_error(message)
        return Ready(message.member, time.monotonic(), message.number)

    def _unreadable_error(self, message: DataUnreadable) -> RunError:
        return RunError(f"{message.reason}: stopped; {self._context.remedy}, {_DATA_REMEDY}")


def _missed_text(missed: SnapshotMissed) -> str:
    where = f"{missed.member.process} cannot keep its part"
    return f"iteration {missed.stamp.step} cannot be saved: {where}: {missed.reason}"


class _MembershipDriver:
    """Reports events to the membership of a run, and carries out its commands.

    Args:
        context: settings and objects of the run.

    Attributes:
        membership: current membership.
        services: monitor of the checkpoint service and the compile service.
        results: handler for the results of workers.
    """

    def __init__(self, context: RunContext):
        self._context, self._children, self._reporter = context, context.children, context.reporter
        self._ticked = now = time.monotonic()
        spec = context.spec
        self.membership = Membership.of(spec.processes, spec.deadlines, now, spec.policy)
        self.services, self.results = ServiceMonitor(context), WorkerResults(context)
        self._coordination: list[CoordinationService] = []  # of the newest generations, oldest first
        self._held: dict[Process, Member] = {}

    def close(self) -> None:
        """Closes the coordination services."""
        while self._coordination:
            self._coordination.pop(0).close()

    def turn(self) -> None:
        """Runs one round of the event loop: messages, deaths, the membership's decision, late services."""
        deaths = self._children.deaths()
        # Collected before the messages but reported after them, so that no message of a dead process is lost.
        for child, line, received in self._children.received(0.0 if deaths else _PAUSE_S):
            self._take(child, line, received)
        for death in deaths:
            if isinstance(death.child, Member):
                self.report(Died(death.child, death.time, death.reason, death.is_own))
            else:
                self.services.died(death.child)
        now = time.monotonic()
        if now - self._ticked > _ASLEEP_S:
            self.report(ClockJumped(now))
        self._ticked = now
        self.report(Tick(now))
        self.services.tick(now, has_slept=now < self.membership.paused_until)

    def report(self, event: Event | None) -> None:
        """Reports an event to the membership and carries out the commands, repeatedly if these cause further events."""
        events = deque[Event | None]([event])
        while events:
            event, before = events.popleft(), self.membership
            if event is not None:
                self.membership, commands = before.on(event)
                self._reporter.on(event, before, self.membership, commands)
                events.extend([self.carry_out(command) for command in commands])

    def take_from_worker(self, line: str, member: Member, received: float) -> None:
        """Handles a line from a worker; ignores results of processes that count as dead."""
        message = WORKER_MESSAGES.read(line, member=member, time=received)
        status = self.membership.statuses[member.process]
        is_member = status.member == member and status.is_alive
        event = self.results.take(message) if is_member or isinstance(message, Message) else None
        self.report(event)

    def carry_out(self, command: Command) -> Event | None:
        """Carries out a command of the membership.

        Returns:
            The event that answers the command, or None if there is none.

        Raises:
            RunError: the command ends the run.
        """
        checkpoints = self._context.checkpoints
        match command:
            case FormGeneration(_, members):
                if not command.stays_connected:
                    self._coordination.append(CoordinationService(len(members), self._context.spec.services))
                self.send(members, FormGroup(command, self._coordination[-1].address))
            case PreloadPrograms(_, members) | Connect(_, members):
                self.send(members, command)
            case ActivateGeneration():
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
            case ExcludeProcess(process, _):  # reading its log here could hold up the run
                self._reporter.show_line(f"the log of process {process} is {self._context.spec.log(str(process))}")
            case AbortRun(process, reason):
                self._give_up(process, reason)
            case StopRun(reason, remedy):
                raise RunError(f"{reason}: stopped; {remedy or self._context.remedy}")
            case StageLost():
                pass
        return None

    def hold_ready(self) -> None:
        """Prespawns the next incarnation of every live process, so that a restart need not wait for its imports."""
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
        """Processes of the newest generation, which must exist."""
        assert self.membership.generation is not None
        return [member.process for member in self.membership.generation.form.members]

    def _take(self, child: object, line: str, received: float) -> None:
        """Passes a line to the handler for its sender: a worker, a service, or the nodes."""
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
        # JAX aborts a process when its coordination service ends. By now all members have left the earlier services.
        while len(self._coordination) > 1:
            self._coordination.pop(0).close()
        checkpoints = self._context.checkpoints
        newest, is_full = checkpoints.newest_loadable, checkpoints.newest_is_complete
        return CheckpointsListed(time.monotonic(), newest, is_full, checkpoints.is_busy, self._reporter.written)

    def _start_generation(self, command: StartGeneration) -> None:
        membership, processes = self.membership, self._processes
        assert membership.generation is not None
        form = membership.generation.form
        if self.results.unreadable is not None:
            self.send(form.members, Halt(form.number, 0))
        self.send(form.members, command)
        self._context.checkpoints.set_processes(processes, form.number, form.cut)
        self._context.checkpoints.on(saver.WriterNeeded())
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

    def _give_up(self, process: Process, reason: str) -> NoReturn:
        log = self._context.spec.log(str(process))
        if log.exists():  # it does not if the process could not even be started
            last = log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
            self._reporter.show_line("\n".join([f"the last lines of {log}:", *last]))
        raise RunError(f"process {process} {reason}: stopped; {self._context.remedy}")


class Supervisor:
    """Supervises a run from start to end; a context manager that leaves no process behind.

    Args:
        context: settings and objects of the run.
    """

    def __init__(self, context: RunContext):
        self._context, self._spec, self._reporter = context, context.spec, context.reporter
        self._driver = _MembershipDriver(context)
        self._stop_by = math.inf
        self._mender = DirectoryMender(context.mend)

    def __enter__(self) -> Self:
        self._mender.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._mender.__exit__()
        children = self._context.children
        statuses = [status for status in self._driver.membership.statuses.values() if status.member in children]
        members = [status.member for status in statuses]
        for status in statuses:
            if status.state is ProcessState.STARTING:  # still importing JAX: it reads no command, and has no state
                children.signal(status.member, signal.SIGKILL)
        self._driver.send(members, Stop())
        children.wait_for(members)
        self._driver.close()

    def run(self, is_stop_requested: Callable[[], bool] = lambda: False) -> None:
        """Runs until all members of a generation have run all their iterations, or until a stop is requested.

        Raises:
            RunError: a process dies repeatedly, the state is lost, the loss is no longer finite, or the last iteration
                could not be saved.
        """
        processes, children = self._spec.processes, self._context.children
        away = [process for process in processes if children.node_missing_s(process)]
        if away:
            self._reporter.show_line(f"waiting for the nodes of {', '.join(map(str, away))}")
        for process in processes:
            if process not in away:
                self._driver.report(self._driver.carry_out(StartProcess(process)))
        while not self._driver.membership.is_done and not is_stop_requested():
            self._turn()
        while self._context.checkpoints.is_busy and not is_stop_requested():
            self._turn()
        self._report_skipped_faults()
        if is_stop_requested():
            self._stop_in_order()
        self._driver.results.check_ended()

    def keep_unsaved(self) -> str | None:
        """Saves the newest state outside the run directory, at the end of a run that could not save it there.

        Returns:
            A line for the user on where the state was saved, or that it was not; None if nothing is unsaved, or if the
            run directory belongs to another run.
        """
        checkpoints, services = self._context.checkpoints, self._driver.services
        try:
            self._reporter.check()
        except RunError:
            return None  # the checkpoint service would clean up in a directory that another run now owns
        if (step := checkpoints.unsaved) is None:
            return None
        services.failure = services.failure or saver.nothing_kept(step)
        checkpoints.on(saver.FallbackRequested())
        limit_s = 2 * self._spec.deadlines.saving  # also ends the wait if the service cannot be killed
        deadline = min(time.monotonic() + limit_s, self._stop_by)
        while checkpoints.is_busy and time.monotonic() < deadline:
            deaths = self._context.children.deaths()
            has_died = any(death.child == CHECKPOINT_SERVICE for death in deaths)
            if has_died and saver.WriterAction.GIVE_UP in checkpoints.on(saver.WriterDied()):
                break
            for child, line, _ in self._context.children.received(_PAUSE_S):
                with suppress(OSError, RunError):  # the disk that failed may not take the log lines either
                    if child == CHECKPOINT_SERVICE:
                        services.take_checkpoint_answer(line, self._driver.membership)
            checkpoints.tick()
        return services.failure or None

    def _turn(self) -> None:
        """Runs one round of the event loop: handles all new messages and deaths, injects faults, restarts processes."""
        try:
            self._reporter.check()
        except RunError:
            # The service must not write into a directory that now belongs to another run.
            self._context.children.signal(CHECKPOINT_SERVICE, signal.SIGKILL)
            raise
        self._reporter.raise_failed()  # a save waits for its record: if that cannot be written, it would wait forever
        if (text := self._mender.news()) is not None:
            self._reporter.note("directories", self._reporter.written, text, reason=text)
        self._driver.turn()
        newest = max((status.finished for status in self._driver.membership.statuses.values()), default=0)
        for fault in self._spec.faults.due(newest, lambda process: self._context.programs.is_compiled(process.worker)):
            self._inject(fault)
        self._restart_dead(newest)
        # During a recovery the members need the CPU cores: compile and prespawn only afterwards.
        if self._driver.membership.generation is not None and not self._driver.membership.is_recovering:
            self._context.programs.send_request()
            if self._spec.policy.recovery == "restart":
                self._driver.hold_ready()
        self._reporter.show(self._driver.membership)

    def _inject(self, fault: Fault) -> None:
        """Injects a fault into a process, if it is alive."""
        member = self._driver.membership.statuses[fault.process].member
        if member not in self._context.children:
            self._note_skipped(fault, "did not happen", f"{fault.process} was down already")
            return
        now = time.monotonic()
        self._reporter.fault_injected(fault.process, fault.kind, now)
        self._driver.report(FaultInjected(member, now))
        if fault.kind == "hang":
            self._driver.send([member], Hang())
        else:
            self._context.children.signal(member, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _report_skipped_faults(self) -> None:
        """Reports the faults that waited for compiled programs until the end of the run, and why these were missing."""
        membership = self._driver.membership
        for fault in self._spec.faults.still_waiting(self._reporter.written):
            if membership.lost_without([*membership.dead, fault.process]):
                reason = "no process would have been left in its stage"
            elif self._context.programs.has_ended:
                reason = "the compile service has died too often"
            else:
                reason = "the programs for it were not compiled by then"
            self._note_skipped(fault, "waited until the run ended, and did not happen", reason)

    def _note_skipped(self, fault: Fault, what: str, reason: str) -> None:
        text = f"--chaos '{fault}' {what}: {reason}"
        self._reporter.note("fault_skipped", self._reporter.written, text, fault=str(fault), reason=reason)

    def _restart_dead(self, newest: int) -> None:
        """Lets the membership restart dead processes, except those that fault injection keeps down.

        Args:
            newest: newest iteration that any process has finished.
        """
        membership = self._driver.membership
        generation = membership.generation
        continues = self._spec.policy.recovery == "live" or (generation is not None and generation.is_live)
        if self._driver.results.is_stopping and continues and not membership.has_lost_stages:
            return  # a process that rejoins would only delay the others
        if dead := self._driver.membership.dead:
            times = {process: self._context.children.node_missing_s(process) for process in self._spec.processes}
            away = {process: away_s for process, away_s in times.items() if away_s}
            held_down = frozenset(process for process in dead if self._spec.faults.keeps_down(process, newest))
            self._driver.report(MayRestart(time.monotonic(), away, held_down))

    def _stop_in_order(self) -> None:
        """Stops all members after the same iteration and saves its state, within ``Deadlines.stopping``."""
        limit_s, reported = self._spec.deadlines.stopping, ""
        checkpoints, services, results = self._context.checkpoints, self._driver.services, self._driver.results
        self._stop_by, results.is_stopping = time.monotonic() + limit_s, True
        services.saved = checkpoints.newest or 0
        self._driver.report(StopRequested(time.monotonic()))
        self._halt()
        while awaited := results.last_iteration.awaited(
            self._driver.membership, self._reporter.written, services.saved, is_busy=checkpoints.is_busy
        ):
            left_s = self._stop_by - time.monotonic()
            if left_s < 0 and self._driver.membership.has_lost_stages:
                return
            if left_s < 0:
                text = f"has not stopped within {limit_s:g} s, and waited for {awaited}"
                unsaved = f"stopped without saving iteration {self._reporter.written}"
                raise RunError(f"{text}: {unsaved}; {self._context.remedy}")
            if self._driver.membership.is_done and checkpoints.unsaved is not None and left_s < limit_s / 2:
                return  # leaves the rest of the time for ``keep_unsaved``
            if awaited != reported:
                self._reporter.show_line(f"stopping: waiting for {awaited}")
                reported = awaited
            self._turn()
            self._halt()

    def _halt(self) -> None:
        """Tells the members to stop after one last iteration, unless everything is saved already."""
        membership, results = self._driver.membership, self._driver.results
        if self._reporter.written > self._driver.services.saved and (halt := results.last_iteration.halt(membership)):
            assert membership.generation is not None
            self._driver.send(membership.generation.form.members, halt)
