"""The supervisor of a run: runs it to its end, stops it in order, injects faults and keeps what could not be saved.

It is a member of no generation, so any process may die. Failures are handled by the membership driver.
"""

import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from swift.elastic.coordinator.checkpoint_client import CHECKPOINT_SERVICE
from swift.elastic.coordinator.fault_injection import Fault
from swift.elastic.coordinator.membership_driver import MembershipDriver
from swift.elastic.coordinator.run_spec import RunContext
from swift.elastic.membership.commands import StartProcess
from swift.elastic.membership.events import FaultInjected, MayRestart, StopRequested
from swift.elastic.membership.run_status import ProcessState
from swift.elastic.state.directory_mender import DirectoryMender
from swift.elastic.transport.worker_messages import Hang, Stop
from swift.errors import RunError

_PAUSE_S = 0.02


class Supervisor:
    """Runs the processes of a run; a context manager that leaves none behind.

    Args:
        context: objects of the run.
    """

    def __init__(self, context: RunContext):
        self._context, self._spec, self._reporter = context, context.spec, context.reporter
        self._driver = MembershipDriver(context)
        self._stop_by = math.inf
        self._mender = DirectoryMender(context.mend)

    def __enter__(self) -> Self:
        self._mender.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._mender.__exit__()
        children = self._context.children
        statuses = [one for one in self._driver.membership.statuses.values() if one.member in children]
        members = [status.member for status in statuses]
        for status in statuses:
            if status.state is ProcessState.STARTING:  # it imports JAX, reads no commands, and has nothing to keep
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
        away = [process for process in processes if children.away_s(process)]
        if away:
            self._reporter.show_line(f"waiting for the nodes of {', '.join(map(str, away))}")
        for process in processes:
            if process not in away:
                self._driver.report(self._driver.carry_out(StartProcess(process)))
        while not self._driver.membership.is_done and not is_stop_requested():
            self._turn()
        while self._context.checkpoints.is_busy and not is_stop_requested():
            self._turn()
        self._tell_of_missed_faults()
        if is_stop_requested():
            self._stop_in_order()
        self._driver.results.check_ended()

    def keep_unsaved(self) -> str | None:
        """Has the checkpoint service keep a state whose save has failed elsewhere, at the end of the run.

        Returns:
            A line on its location; None if nothing is unsaved, or the run directory belongs to another run.
        """
        checkpoints, services = self._context.checkpoints, self._driver.services
        try:
            self._reporter.check()
        except RunError:
            return None  # the service would clean up in a directory whose new owner knows nothing of this state
        if checkpoints.unsaved is None:
            return None
        checkpoints.keep_elsewhere()
        limit_s = 2 * self._spec.deadlines.saving  # for a service that cannot be killed
        deadline = min(time.monotonic() + limit_s, self._stop_by)
        while checkpoints.is_busy and time.monotonic() < deadline:
            deaths = self._context.children.deaths()
            if any(death.child == CHECKPOINT_SERVICE and not checkpoints.died() for death in deaths):
                break
            for child, line, _ in self._context.children.received(_PAUSE_S):
                with suppress(OSError, RunError):  # the disk may not take the events either
                    if child == CHECKPOINT_SERVICE:
                        services.take_checkpoint_answer(line, self._driver.membership)
            checkpoints.kill_if_late()
        return services.failure

    def _turn(self) -> None:
        """Handles everything that has happened since the last turn."""
        try:
            self._reporter.check()
        except RunError:
            # It must not write into a directory that belongs to another run.
            self._context.children.signal(CHECKPOINT_SERVICE, signal.SIGKILL)
            raise
        self._reporter.raise_failed()  # a save waits for its record
        if (text := self._mender.news()) is not None:
            self._reporter.note("directories", self._reporter.written, text, why=text)
        self._driver.turn()
        self._context.checkpoints.send_if_due()
        newest = max((status.finished for status in self._driver.membership.statuses.values()), default=0)
        for fault in self._spec.faults.due(newest, lambda process: self._context.programs.is_prepared(process.worker)):
            self._inject(fault)
        self._restart_dead(newest)
        if self._driver.membership.generation is not None and not self._driver.membership.is_recovering:
            self._context.programs.send_request()  # members that recover need the cores more
            if self._spec.policy.recovery == "restart":
                self._driver.hold_ready()
        self._reporter.show(self._driver.membership)

    def _inject(self, fault: Fault) -> None:
        """Injects a fault into a process, if it is alive."""
        member = self._driver.membership.statuses[fault.process].member
        if member not in self._context.children:
            self._note_missed(fault, "did not happen", f"{fault.process} was down already")
            return
        now = time.monotonic()
        self._reporter.fault_injected(fault.process, fault.kind, now)
        self._driver.report(FaultInjected(member, now))
        if fault.kind == "hang":
            self._driver.send([member], Hang())
        else:
            self._context.children.signal(member, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _tell_of_missed_faults(self) -> None:
        """Notes the faults that have waited for programs to the end, and why."""
        membership = self._driver.membership
        for fault in self._spec.faults.still_waiting(self._reporter.written):
            if membership.lost_without([*membership.dead, fault.process]):
                why = "no process would have been left in its stage"
            elif self._context.programs.has_ended:
                why = "the compile service has died too often"
            else:
                why = "the programs for it were not prepared by then"
            self._note_missed(fault, "waited until the run ended, and did not happen", why)

    def _note_missed(self, fault: Fault, what: str, why: str) -> None:
        text = f"--chaos '{fault}' {what}: {why}"
        self._reporter.note("fault_missed", self._reporter.written, text, fault=str(fault), why=why)

    def _restart_dead(self, newest: int) -> None:
        """Has dead processes restarted, except those that fault injection keeps down after the ``newest`` iteration."""
        generation = self._driver.membership.generation
        continues = self._spec.policy.recovery == "live" or (generation is not None and generation.is_live)
        if self._driver.results.is_stopping and continues:
            return  # a process that rejoins would only delay the others
        if dead := self._driver.membership.dead:
            times = {process: self._context.children.away_s(process) for process in self._spec.processes}
            away = {process: away_s for process, away_s in times.items() if away_s}
            held_down = frozenset(process for process in dead if self._spec.faults.keeps_down(process, newest))
            self._driver.report(MayRestart(time.monotonic(), away, held_down))

    def _stop_in_order(self) -> None:
        """Has the last iteration saved as a checkpoint, within the time limit of a stop."""
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
            if left_s < 0:
                text = f"has not stopped within {limit_s:g} s, and waited for {awaited}"
                unsaved = f"stopped without saving iteration {self._reporter.written}"
                raise RunError(f"{text}: {unsaved}; {self._context.remedy}")
            if self._driver.membership.is_done and checkpoints.unsaved is not None and left_s < limit_s / 2:
                return  # the rest of the time is for keeping it elsewhere
            if awaited != reported:
                self._reporter.show_line(f"stopping: waiting for {awaited}")
                reported = awaited
            self._turn()
            self._halt()

    def _halt(self) -> None:
        """Has members run no further than one last iteration, unless everything is saved."""
        membership, results = self._driver.membership, self._driver.results
        if self._reporter.written > self._driver.services.saved and (halt := results.last_iteration.halt(membership)):
            assert membership.generation is not None
            self._driver.send(membership.generation.form.members, halt)
