"""The supervisor of a run: reports what happens to its processes to the membership, and has its decisions carried out.

All decisions are those of ``swift.elastic.membership``. The supervisor is a member of no generation itself, so that any
process may die.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from swift.elastic.coordinator.checkpoint_client import KEEPER, CheckpointClient, remedy
from swift.elastic.coordinator.command_executor import CommandExecutor
from swift.elastic.coordinator.compile_client import CompileClient
from swift.elastic.coordinator.last_iteration import LastIteration
from swift.elastic.coordinator.record_checks import check_finite, check_placed
from swift.elastic.coordinator.run_spec import RunSpec
from swift.elastic.coordinator.service_monitor import ServiceMonitor
from swift.elastic.events import Reporter
from swift.elastic.membership import (
    Died,
    Event,
    Harmed,
    MayRestart,
    Member,
    Membership,
    Message,
    Ready,
    StartProcess,
    Tick,
    Woke,
)
from swift.elastic.transport import (
    NODE_NEWS,
    NODES,
    WORKER_NEWS,
    Children,
    DataUnreadable,
    Hang,
    NodeNews,
    Planned,
    Record,
    SnapshotKept,
    SnapshotMissed,
    Stop,
    WorkerNews,
)
from swift.errors import RunError

_PAUSE_S, _ASLEEP_S = 0.02, 1.0
_DATA_REMEDY = "once the data are repaired"


class Supervisor:
    """The processes of a run; a context manager, which leaves none behind.

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
        self._run_spec, self._children, self._saving, self._reporter = run_spec, children, saving, reporter
        self._preparing, limits, now = preparing, run_spec.deadlines, time.monotonic()
        self._membership = Membership.of(run_spec.processes, limits, now, run_spec.policy)
        self._executor = CommandExecutor(run_spec, children, saving, preparing, reporter)
        self._services = ServiceMonitor(children, saving, preparing, reporter, limits.saving, limits.dying)
        self._last_iteration = LastIteration()
        self._unreadable: DataUnreadable | None = None
        self._refused: SnapshotMissed | None = None  # the newest state of which a part could not be kept
        self._turned, self._is_stopping, self._stop_by = now, False, math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        members = [status.member for status in self._membership.statuses.values() if status.member in self._children]
        self._executor.send(members, Stop())
        self._children.wait_for(members)
        self._executor.close()

    def run(self, is_called_off: Callable[[], bool] = lambda: False) -> None:
        """Runs until all members of a generation have run all their iterations, or until the run is called off.

        Raises:
            RunError: a process dies again and again, the state is lost, the loss is not finite any more, or the last
                iteration is not saved though it should be.
        """
        away = [process for process in self._membership.processes if self._children.away_s(process)]
        if away:
            self._reporter.tell(f"waiting for the nodes of {', '.join(map(str, away))}")
        for process in self._membership.processes:
            if process not in away:
                started = self._executor.carry_out(StartProcess(process), self._membership)
                assert started is not None
                self._report(started)
        while not self._membership.is_done and not is_called_off():
            self._turn()
        while self._saving.is_busy and not is_called_off():
            self._turn()
        if is_called_off():
            self._stop_in_order()
        elif self._unreadable is not None:
            raise RunError(f"{self._unreadable.why}: stopped; {self._remedy()}, {_DATA_REMEDY}")
        if self._refused is not None and self._refused.stamp.step > (self._saving.newest or 0):
            raise RunError(f"{_refusal_text(self._refused)}: stopped; {self._remedy()}")

    def keep_unsaved(self) -> str | None:
        """Has what could not be saved kept elsewhere, now that nothing follows.

        Returns:
            A line on where it is; None where nothing is unsaved, or the run directory is another's.
        """
        try:
            self._reporter.check()
        except RunError:
            return None  # the keeper would tidy up there, and the directory's owner knows nothing of this state
        if self._saving.unsaved is None:
            return None
        self._saving.keep_elsewhere()
        limit_s = 2 * self._run_spec.deadlines.saving  # for a keeper that cannot be killed
        deadline = min(time.monotonic() + limit_s, self._stop_by)
        while self._saving.is_busy and time.monotonic() < deadline:
            if any(death.who == KEEPER and not self._saving.died() for death in self._children.deaths()):
                break
            for line in [line for who, line, _ in self._children.heard(_PAUSE_S) if who == KEEPER]:
                with suppress(OSError, RunError):  # the disk may not take the events either
                    self._services.hear_keeper(line, self._membership)
            self._saving.end_if_late()
        return self._services.failure

    def _turn(self) -> None:
        """Reports what has happened, and has the decisions carried out."""
        try:
            self._reporter.check()
        except RunError:
            self._children.signal(KEEPER, signal.SIGKILL)  # before it writes where another does
            raise
        self._listen()
        self._decide(time.monotonic())
        self._saving.try_again_if_due()
        newest = max((status.finished for status in self._membership.statuses.values()), default=0)
        self._inject_faults(newest)
        self._restart_dead(newest)
        if self._membership.generation is not None and not self._membership.is_recovering:
            self._preparing.follow()  # members that recover need the cores more
        self._reporter.show(self._membership)

    def _listen(self) -> None:
        """Takes all messages, then all deaths."""
        deaths = self._children.deaths()
        for who, line, when in self._children.heard(0.0 if deaths else _PAUSE_S):
            if isinstance(who, Member):
                self._hear(WORKER_NEWS.read(line, member=who, time=when), who)
            elif who == KEEPER:
                event = self._services.hear_keeper(line, self._membership)
                if event is not None:
                    self._report(event)
            elif who == NODES:
                self._hear_of_node(NODE_NEWS.read(line))
            else:
                self._services.hear_preparer(line, when)
        for death in deaths:
            if isinstance(death.who, Member):
                self._report(Died(death.who, death.time, death.why, death.is_own))
            else:
                self._services.died(death.who)

    def _decide(self, now: float) -> None:
        """Lets the membership decide, and keeps the services to their deadlines."""
        if now - self._turned > _ASLEEP_S:
            self._report(Woke(now))
        self._turned = now
        self._report(Tick(now))
        if now >= self._membership.deaf_until:
            self._services.end_late(now)

    def _report(self, event: Event) -> None:
        """Reports an event to the membership, and carries out its commands, with all that follows from them."""
        events = deque([event])
        while events:
            event, before = events.popleft(), self._membership
            self._membership, commands = before.on(event)
            self._reporter.on(event, before, self._membership, commands)
            answers = [self._executor.carry_out(command, self._membership) for command in commands]
            events.extend(answer for answer in answers if answer is not None)

    def _hear(self, news: WorkerNews, who: Member) -> None:
        if isinstance(news, Message):
            self._report(news)
            return
        status = self._membership.statuses[who.process]
        if status.member != who or not status.is_there:
            return  # only iterations and states of the run's members count
        match news:
            case Record(record):
                step, norms = record["step"], {name: record[name] for name in ("loss", "grad_norm")}
                check_placed(self._reporter, step, self._remedy, record.get("misplaced"))
                check_finite(self._reporter, step, self._remedy, **norms)
                self._last_iteration.record(record["step_ms"] / 1000)
                self._reporter.record(record)
            case Planned(number, facts):
                self._reporter.plan(number, facts)
            case SnapshotKept(_, stamp, loss):
                if loss is not None:
                    check_finite(self._reporter, stamp.step, self._remedy, loss_after=loss)
                self._saving.add(news, is_full=self._is_stopping)
            case DataUnreadable():
                self._end_without_data(news)
            case SnapshotMissed(_, stamp, why):
                self._refused = news
                self._reporter.note("checkpoint_failed", stamp.step, _refusal_text(news), error=why)

    def _end_without_data(self, news: DataUnreadable) -> None:
        """Has the state that all have kept for a checkpoint: in a new generation, which runs no iteration."""
        if self._unreadable is None:
            self._unreadable, self._executor.runs_iterations = news, False
            self._reporter.note("data_lost", self._reporter.written, news.why, error=news.why)
        elif news.number > self._unreadable.number:  # not even that can be done without data
            raise RunError(f"{news.why}: stopped; {self._remedy()}, {_DATA_REMEDY}")
        self._report(Ready(news.member, time.monotonic(), news.number))

    def _hear_of_node(self, news: NodeNews) -> None:
        text = f"node {news.node} {'has joined' if news.is_there else 'is lost'}"
        self._reporter.note("node", self._reporter.written, text, **news._asdict())

    def _inject_faults(self, newest: int) -> None:
        """Harms processes as fault injection asks after the ``newest`` iteration."""
        for trouble in self._run_spec.chaos.harm(newest):
            member = self._membership.statuses[trouble.process].member
            if member in self._children:
                self._harm(trouble.kind, member)

    def _restart_dead(self, newest: int) -> None:
        """Has dead processes restarted, except those that fault injection keeps down after the ``newest`` iteration."""
        if self._is_stopping and self._run_spec.policy.recovery == "live":
            return  # a process that rejoins would only delay the others
        if dead := self._membership.dead:
            times = {process: self._children.away_s(process) for process in self._membership.processes}
            away = {process: away_s for process, away_s in times.items() if away_s}
            held_down = frozenset(process for process in dead if self._run_spec.chaos.keeps_down(process, newest))
            self._report(MayRestart(time.monotonic(), away, held_down))

    def _harm(self, how: str, member: Member) -> None:
        now = time.monotonic()
        self._reporter.harmed(member.process, how, now)
        self._report(Harmed(member, now))
        if how == "hang":
            self._executor.send([member], Hang())
        else:
            self._children.signal(member, signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def _stop_in_order(self) -> None:
        """Has the last iteration kept as a checkpoint, as far as there is time for that."""
        limit_s, reported = self._run_spec.deadlines.stopping, ""
        self._stop_by, self._is_stopping = time.monotonic() + limit_s, True
        self._services.saved = self._saving.newest or 0
        self._halt()
        while awaited := self._last_iteration.awaited(
            self._membership, self._reporter.written, self._services.saved, is_busy=self._saving.is_busy
        ):
            left_s = self._stop_by - time.monotonic()
            if left_s < 0:
                text = f"has not stopped within {limit_s:g} s, and waited for {awaited}"
                raise RunError(f"{text}: stopped without saving iteration {self._reporter.written}; {self._remedy()}")
            if self._membership.is_done and self._saving.unsaved is not None and left_s < limit_s / 2:
                return  # the rest of the time is for keeping it elsewhere
            if awaited != reported:
                self._reporter.tell(f"stopping: waiting for {awaited}")
                reported = awaited
            self._turn()
            self._halt()

    def _halt(self) -> None:
        """Has members run no further than one last iteration, unless all is saved."""
        if self._reporter.written > self._services.saved and (halt := self._last_iteration.halt(self._membership)):
            assert self._membership.generation is not None
            self._executor.send(self._membership.generation.form.members, halt)

    def _remedy(self) -> str:
        return remedy(self._saving.newest)


def _refusal_text(refused: SnapshotMissed) -> str:
    where = f"{refused.member.process} has no room for its part"
    return f"iteration {refused.stamp.step} cannot be saved: {where}: {refused.why}"
