"""The supervisor: starts the processes of a run, sees them die, and tells those that live what to do.

All decisions are ``swift.elastic.membership.state_machine``'s. Here is what it decides upon, and what is done about it:
processes, pipes, and the coordination service of every generation. It is no part of any generation itself, so that any
process may die.
"""

import json
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from swift.elastic.coordinator.checkpoint_client import KEEPER, CheckpointClient
from swift.elastic.coordinator.compile_client import PREPARER, CompileClient
from swift.elastic.coordinator.restart_policy import RestartPolicy
from swift.elastic.coordinator.run_spec import RunSpec
from swift.elastic.events import Reporter, cut_text
from swift.elastic.jax_group import CoordinationService
from swift.elastic.membership import (
    Command,
    Died,
    Enter,
    Event,
    Form,
    GiveUp,
    Go,
    Kill,
    Member,
    Membership,
    Message,
    Process,
    Ready,
    RestartAll,
    Retire,
    Stamp,
    Started,
    Tick,
)
from swift.elastic.transport import (
    NODES,
    Anew,
    Children,
    CompileFailed,
    CompileRequest,
    DataUnreadable,
    Death,
    Done,
    Failed,
    FormGroup,
    Halt,
    Hang,
    Kept,
    Loaded,
    Planned,
    Record,
    Saved,
    SnapshotKept,
    SnapshotMissed,
    StartGeneration,
    Stop,
    WorkerCommand,
    WorkerNews,
    order_line,
    read_news,
)
from swift.errors import RunError

_PAUSE_S, _ASLEEP_S = 0.02, 1.0
_NUM_TIMED = 10
"""Iterations of which the shortest tells how many a second may hold: a single one may have waited for something."""
_HEARING_S = 1.0
"""How long it may take until all members have heard something."""
_MENDED = "once the data are mended"
_SHOWN_LINES = 20


class Supervisor:
    """The processes of a run; a context manager, which leaves none behind.

    Args:
        run_spec: how the run goes.
        children: where processes are started.
        saving: its checkpoints.
        preparing: what it has prepared.
        reporter: of what happens.
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
        self._preparing = preparing
        now = time.monotonic()
        self._membership = Membership.of(run_spec.processes, run_spec.deadlines, now, is_elastic=run_spec.is_elastic)
        self._services: list[CoordinationService] = []
        self._done: set[Member] = set()
        self._restoring: Go | None = None
        self._killed: dict[Hashable, float] = {}  # the keeper and the preparer, where their deaths are on their way
        self._restart_policy = RestartPolicy(run_spec, children)
        self._unreadable: DataUnreadable | None = None
        self._base = 0  # the iteration after which the newest generation goes on
        self._turned = self._deaf_until = time.monotonic()
        self._steps_s = deque([_HEARING_S], maxlen=_NUM_TIMED)  # of the newest iterations
        self._is_stopping, self._is_loading = False, False
        self._halted = self._last = self._saved = (
            0  # the newest generation told to halt; its last iteration; the last saved
        )
        self._kept = ""  # what was told last of a save that has failed
        self._refused: SnapshotMissed | None = None  # the newest state of which a part could not be kept
        self._stop_by = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        while self._services:
            self._services.pop(0).close()

    def run(self, is_called_off: Callable[[], bool] = lambda: False) -> None:
        """Until all members of a generation have run all their iterations, or until it is called off.

        Raises:
            RunError: a process dies again and again, the state is lost, the loss is not finite any more, or the last
                iteration is not saved though it should be.
        """
        away = [process for process in self._membership.processes if self._children.away_s(process)]
        if away:
            self._reporter.tell(f"waits for the nodes on which {', '.join(map(str, away))} have their places")
        for process in self._membership.processes:
            if process not in away:
                self._start(process)
        while not self._is_done() and not is_called_off():
            self._turn()
        while self._saving.is_busy and not is_called_off():
            self._turn()
        if is_called_off():
            self._stop_in_order()
        elif self._unreadable is not None:
            raise RunError(f"{self._unreadable.why}: stopped; {self._remedy()}, {_MENDED}")
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
            return None  # a keeper would tidy up there, and who has it now knows nothing of this state
        if self._saving.unsaved is None:
            return None
        self._saving.keep_elsewhere()
        limit_s = 2 * self._run_spec.deadlines.saving  # for a keeper that cannot be killed
        deadline = min(time.monotonic() + limit_s, self._stop_by)
        while self._saving.is_busy and time.monotonic() < deadline:
            if any(death.who == KEEPER and not self._saving.died() for death in self._children.deaths()):
                break
            for who, line, _ in self._children.heard(_PAUSE_S):
                if who == KEEPER:
                    with suppress(OSError, RunError):  # the disk may not take the events either
                        self._hear_keeper(line)
            self._saving.end_if_late()
        return self._kept

    def _turn(self) -> None:
        """Hears what has happened, decides, and does it."""
        try:
            self._reporter.check()
        except RunError:
            self._children.signal(KEEPER, signal.SIGKILL)  # before it writes where another does
            raise
        deaths = self._children.deaths()
        for who, line, when in self._children.heard(0.0 if deaths else _PAUSE_S):
            if isinstance(who, Member):
                self._hear(read_news(line, who, when), who)
            elif who == KEEPER:
                self._hear_keeper(line)
            elif who == NODES:
                self._hear_of_node(**json.loads(line))
            else:
                self._hear_preparer(line, when)
        for death in deaths:
            self._mourn(death)
        self._decide(time.monotonic())
        self._saving.try_again_if_due()
        self._make_trouble()
        self._look_ahead()
        self._reporter.show(self._membership)

    def _decide(self, now: float) -> None:
        """Lets the membership decide, unless the supervisor itself has just been asleep: it has not heard enough."""
        if now - self._turned > _ASLEEP_S:
            self._deaf_until = now + self._run_spec.deadlines.heartbeat
        self._turned = now
        if self._restoring is not None or self._is_done():
            self._membership = self._membership.excused(now)  # who waits for a checkpoint is not late
        if now < self._deaf_until:
            return
        self._feed(Tick(now))
        if self._saving.end_if_late():
            why = f"did not answer for {self._run_spec.deadlines.saving:g} s"
            self._reporter.note("kill", self._reporter.written, f"the {KEEPER} {why}: killed", process=KEEPER, why=why)
            self._killed[KEEPER] = now
        if self._preparing.end_if_silent():
            why = "was not heard in time"
            self._reporter.note("kill", self._reporter.written, None, process=PREPARER, why=why)
            self._killed[PREPARER] = now
        for who in [who for who, at in self._killed.items() if now - at > self._run_spec.deadlines.dying]:
            self._children.abandon(who)
            self._mourn(Death(who, "could not be killed", now))

    def _is_done(self) -> bool:
        generation = self._membership.generation
        return generation is not None and generation.is_live and set(generation.form.members) <= self._done

    def _hear(self, news: WorkerNews, who: Member) -> None:
        status = self._membership.statuses[who.process]
        if (status.member != who or not status.is_there) and not isinstance(news, Message):
            return  # of iterations and states only those count that are the run's; the membership ends who says more
        match news:
            case Record(record):
                self._check_placed(record["step"], record.get("misplaced"))
                self._check_finite(record["step"], loss=record["loss"], grad_norm=record["grad_norm"])
                self._steps_s.append(record["step_ms"] / 1000)
                self._reporter.record(record)
            case Planned(number, facts):
                self._reporter.plan(number, facts)
            case SnapshotKept(_, stamp, loss):
                if loss is not None:
                    self._check_finite(stamp.step, loss_after=loss)
                self._saving.add(news, is_full=self._is_stopping)
            case DataUnreadable():
                self._end_without_data(news)
            case SnapshotMissed(_, stamp, why):
                self._refused = news
                self._reporter.note("checkpoint_failed", stamp.step, _refusal_text(news), error=why)
            case Done(member, number):
                if number == self._membership.went:
                    self._done.add(member)
            case _:
                self._feed(news)

    def _end_without_data(self, news: DataUnreadable) -> None:
        """Has the state that all have kept for a checkpoint: in a new generation, which runs no iteration."""
        if self._unreadable is None:
            self._unreadable = news
            self._reporter.note("data_lost", self._reporter.written, news.why, error=news.why)
        elif news.number > self._unreadable.number:  # not even that can be done without data
            raise RunError(f"{news.why}: stopped; {self._remedy()}, {_MENDED}")
        self._feed(Ready(news.member, time.monotonic(), news.number))

    def _hear_keeper(self, line: str) -> None:
        answer = self._saving.hear(line)
        match answer:
            case Saved(step, seconds, path, facts):
                self._saved = step
                self._reporter.note("checkpoint", step, None, path=path, save_ms=1000 * seconds, **facts)
                self._reporter.saved(step)
            case Kept(step, text):
                self._kept = text
            case Loaded() | Anew():
                self._restored(answer)
            case Failed("save", step, why, _):
                pause_s = self._saving.pause_s
                again = "" if pause_s is None else f"; trying again in {pause_s:.0f} s"
                text = self._kept = f"the checkpoint of iteration {step} was not saved: {why}{again}"
                self._reporter.note("checkpoint_failed", step or 0, text, error=why)
            case Failed("recut", step, why, generation):
                if self._is_restoring(generation):
                    raise RunError(f"the state after iteration {step} is lost: {why}: stopped; {self._remedy()}")
            case Failed(_, step, why, generation):
                if self._is_restoring(generation):
                    which = "there is no checkpoint" if step is None else f"that of iteration {step} cannot be read"
                    raise RunError(f"the state is lost, and {which}: stopped; {why}")

    def _hear_preparer(self, line: str, when: float) -> None:
        said = self._preparing.hear(line, when)
        if said is None:
            return
        if isinstance(said, CompileFailed):
            self._reporter.note("prepare_failed", self._reporter.written, said.why, error=said.why)
        else:
            failed = [f"{pipeline}:{stage}" for pipeline, stage in sorted(said.failed)]
            ranks = {} if said.num_ranks is None else {"ranks": said.num_ranks}
            self._reporter.note("prepared", self._reporter.written, None, failed=failed, seconds=said.seconds, **ranks)

    def _hear_of_node(self, node: int, is_there: bool) -> None:
        text = f"node {node} {'is there' if is_there else 'is gone'}"
        self._reporter.note("node", self._reporter.written, text, node=node, is_there=is_there)

    def _feed(self, event: Event) -> None:
        self._apply(*self._membership.on(event), event)

    def _apply(self, after: Membership, commands: Sequence[Command], event: Event) -> None:
        before, self._membership = self._membership, after
        self._reporter.on(event, before, after, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Form(_, members, _):
                self._services.append(CoordinationService(len(members), self._run_spec.services))
                self._done, self._restoring, self._is_loading = set(), None, False
                self._say(members, FormGroup(command, self._services[-1].address))
            case Enter(_, members):
                self._say(members, command)
            case Go():
                # A process whose service ends while it is linked to it is aborted; by now all have left those before.
                while len(self._services) > 1:
                    self._services.pop(0).close()
                self._go(command)
            case Kill(member, _):
                self._children.signal(member, signal.SIGKILL)
            case Retire(member, _):
                self._children.abandon(member)
            case RestartAll():
                self._kill_all([status.member for status in self._membership.statuses.values()])
            case GiveUp(process, why):
                log = self._run_spec.log(str(process))
                if log.exists():  # else it could not even be started
                    last = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
                    self._reporter.tell("\n".join([f"the last lines of {log}:", *last]))
                raise RunError(f"process {process} {why}: stopped; {self._remedy()}")

    def _go(self, go: Go) -> None:
        """Lets the members run, from the newest state there is: theirs, or that of a checkpoint."""
        saved = self._saving.newest
        is_lost = go.stamp is None and (self._reporter.written > 0 or self._run_spec.resumed)
        if is_lost and saved is None and not self._saving.is_busy:
            raise RunError(f"nobody is left who has the state of some stage: stopped; {self._remedy()}")
        generation = self._membership.generation
        assert generation is not None
        processes = [member.process for member in generation.form.members]
        if is_lost or (go.stamp is not None and self._is_behind(go, go.stamp, saved)):
            self._restoring, self._is_loading = go, True
            self._saving.load(go.number, processes)
        elif go.stamp is not None and go.cut is not None:
            self._restoring = go
            self._saving.recut(go.stamp, go.cut, go.number, processes)
        else:
            self._base = 0 if go.stamp is None else go.stamp.step
            self._let_run(StartGeneration(go, self._reporter.written))

    def _is_behind(self, go: Go, stamp: Stamp, saved: int | None) -> bool:
        """Whether a checkpoint is better than the members' state: newer, and one of the two is not all there."""
        is_newer = not go.is_whole and saved is not None and saved > stamp.step
        return is_newer or self._saving.goes_beyond(stamp.step)

    def _is_restoring(self, generation: int) -> bool:
        return self._restoring is not None and self._restoring.number == generation

    def _restored(self, answer: Loaded | Anew) -> None:
        go, stamp = self._restoring, answer.stamp
        if go is None or go.number != stamp.generation:
            return
        if isinstance(answer, Loaded):
            event, text = "restore", f"all go on from the checkpoint of iteration {stamp.step}"
            self._reporter.saved(stamp.step)
        else:
            event = "recut"
            text = cut_text(answer.facts["ranks"], answer.facts["ranks_before"], stamp.step)
        self._reporter.note(event, stamp.step, "\n".join([text, *answer.lines]), epoch=stamp.generation, **answer.facts)
        self._base = stamp.step
        holders = go.holders if isinstance(answer, Anew) else ()
        self._let_run(StartGeneration(Go(go.number, stamp, holders), self._reporter.written, is_restored=True))

    def _let_run(self, leave: StartGeneration) -> None:
        generation = self._membership.generation
        assert generation is not None
        self._restoring, self._is_loading = None, False
        if self._unreadable is not None:
            self._say(generation.form.members, Halt(generation.form.number, 0))
        self._say(generation.form.members, leave)
        processes = [member.process for member in generation.form.members]
        self._saving.go_on(processes)
        self._saving.start()
        there = {process.worker for process in processes}
        failed = frozenset(process.worker for process in self._run_spec.processes if process.worker not in there)
        self._preparing.ask(CompileRequest(failed, len(processes) if self._run_spec.is_elastic else None))

    def _look_ahead(self) -> None:
        """Has what may be needed next prepared, once the members have what they need now: their cores come first."""
        if self._membership.generation is not None and not self._is_recovering():
            self._preparing.follow()

    def _start(self, process: Process) -> None:
        member = Member(process, self._membership.statuses[process].member.incarnation + 1)
        self._children.start(member, self._run_spec.command(process), self._run_spec.log(str(process)))
        self._feed(Started(member, time.monotonic()))

    def _mourn(self, death: Death) -> None:
        self._killed.pop(death.who, None)
        if death.who == KEEPER:
            if not self._saving.died():
                raise RunError(f"the {KEEPER} dies again and again, see its log: stopped; {self._remedy()}")
        elif death.who == PREPARER:
            if not self._preparing.died():
                why = f"the {PREPARER} dies again and again, see its log: nothing is prepared any more"
                self._reporter.note("prepare_failed", self._reporter.written, why, error=why)
        elif isinstance(death.who, Member):
            process = death.who.process
            is_spared = self._membership.statuses[process].spared
            if death.is_own:
                self._restart_policy.mourn(death.who)
            self._feed(Died(death.who, death.time, death.why, death.is_own))
            if self._run_spec.recovery == "restart" and not is_spared and self._membership.generation is not None:
                self._apply(*self._membership.restarted(f"{process} died", death.time), Tick(death.time))

    def _kill_all(self, members: Sequence[Member]) -> None:
        for member in members:
            self._restart_policy.excuse(member)
            self._children.signal(member, signal.SIGKILL)

    def _make_trouble(self) -> None:
        """Does what chaos asks for, and starts again whoever is dead and may come back."""
        statuses = self._membership.statuses
        newest = max((status.finished for status in statuses.values()), default=0)
        for trouble in self._run_spec.chaos.harm(newest):
            member = statuses[trouble.process].member
            if member in self._children:
                self._harm(trouble.kind, member)
        if not self._restart_policy.dead(self._membership) or self._is_recovering():
            return  # the cores are for those who go on; to start a process takes seconds of them
        if self._is_stopping and self._run_spec.recovery == "live":
            return  # who comes back would only hold up the others
        lost = self._restart_policy.given_up(self._membership)
        if lost:
            stages = ", ".join(map(str, lost))
            away = (
                " (or whose node has come back)" if any(map(self._children.away_s, self._membership.processes)) else ""
            )
            raise RunError(f"stage {stages} has nobody left that may be started again{away}: stopped; {self._remedy()}")
        for process in self._restart_policy.due(self._membership, newest):
            self._start(process)

    def _is_recovering(self) -> bool:
        """Whether members form a generation, or have not ended an iteration of it yet."""
        generation = self._membership.generation
        if generation is None or self._restoring is not None:
            return False
        ended = [self._membership.statuses[process].finished > self._base for process, _ in generation.form.members]
        return not generation.is_live or not all(ended)

    def _harm(self, how: str, member: Member) -> None:
        self._reporter.harmed(member.process, how, time.monotonic())
        self._restart_policy.excuse(member)
        if how == "hang":
            self._say([member], Hang())
        else:
            self._children.signal(member, signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def _stop_in_order(self) -> None:
        """Has the last iteration kept as a checkpoint, as far as there is time for that."""
        limit_s, told = self._run_spec.deadlines.stopping, ""
        self._stop_by, self._is_stopping, self._saved = time.monotonic() + limit_s, True, self._saving.newest or 0
        self._halt()
        while awaited := self._awaited():
            left_s = self._stop_by - time.monotonic()
            if left_s < 0:
                text = f"has not stopped within {limit_s:g} s, and waited for {awaited}"
                raise RunError(f"{text}: stopped without saving iteration {self._reporter.written}; {self._remedy()}")
            if self._is_done() and self._saving.unsaved is not None and left_s < limit_s / 2:
                return  # the rest of the time is for keeping it elsewhere
            if awaited != told:
                self._reporter.tell(f"stopping: waits for {awaited}")
                told = awaited
            self._turn()
            self._halt()

    def _awaited(self) -> str:
        """What a run that stops still waits for; nothing where all that there is to keep is kept."""
        newest, is_saving = self._reporter.written, self._saving.is_busy and not self._is_loading
        if self._is_done() or (self._halted and is_saving):
            return "the checkpoint" if is_saving else ""
        is_lost = self._membership.generation is None and self._run_spec.recovery == "live"
        if newest <= self._saved or is_lost or self._is_loading:
            return ""
        if self._halted == self._membership.went and self._halted == self._membership.number:
            return f"iteration {self._last}, which is to be the last"
        return f"all to be at work after a failure; iteration {newest} is not saved yet"

    def _halt(self) -> None:
        """Tells the members of a generation that runs, once, which iteration is to be their last."""
        generation = self._membership.generation
        is_kept = self._reporter.written <= self._saved
        if (
            is_kept
            or generation is None
            or self._restoring
            or self._is_recovering()
            or self._halted == generation.form.number
        ):
            return
        entered = max(self._membership.statuses[process].entered for process, _ in generation.form.members)
        # So far that nobody is beyond it before it hears of it: all have to end the same iteration.
        self._last = entered + max(1, math.ceil(_HEARING_S / max(min(self._steps_s), 1e-3)))
        self._halted = generation.form.number
        self._say(generation.form.members, Halt(self._halted, self._last))

    def _check_finite(self, step: int, **measured: float) -> None:
        if all(map(math.isfinite, measured.values())):
            return
        self._reporter.note("not_finite", step, None, **measured)
        values = ", ".join(f"{name} = {value}" for name, value in measured.items())
        raise RunError(f"{values} at iteration {step}: stopped; {self._remedy()}")

    def _check_placed(self, step: int, flaw: str | None) -> None:
        if flaw is None:
            return
        self._reporter.note("misplaced", step, None, why=flaw)
        raise RunError(
            f"Experiment.placement: {flaw} at iteration {step}: stopped; mend the policy and {self._remedy()}"
        )

    def _remedy(self) -> str:
        saved = self._saving.newest
        if saved is None:
            return "there is no checkpoint; start again in another --run-dir"
        return f"go on from the checkpoint of iteration {saved} with --resume"

    def _say(self, members: Sequence[Member], order: WorkerCommand) -> None:
        line = order_line(order)
        for member in members:
            self._children.say(member, line)

    def _stop(self) -> None:
        members = [status.member for status in self._membership.statuses.values() if status.member in self._children]
        self._say(members, Stop())
        self._children.wait_for(members)


def _refusal_text(refused: SnapshotMissed) -> str:
    where = f"{refused.member.process} has no room for its part"
    return f"iteration {refused.stamp.step} cannot be saved: {where}: {refused.why}"
