"""The two services of a run as the supervisor sees them: their answers, their time limits and their deaths."""

import time
from collections.abc import Hashable

from swift.elastic.coordinator.checkpoint_client import KEEPER, CheckpointClient, remedy
from swift.elastic.coordinator.compile_client import PREPARER, CompileClient
from swift.elastic.events import Reporter, cut_text
from swift.elastic.membership import Event, Membership, Restored, RestoreFailed
from swift.elastic.transport import Anew, Children, CompileFailed, Failed, Kept, Loaded, Saved
from swift.errors import RunError


class ServiceMonitor:
    """Hears the checkpoint service and the compile service, and ends them where they are late.

    Args:
        children: where the services run.
        saving: the client of the checkpoint service.
        preparing: the client of the compile service.
        reporter: writes what happens.
        saving_s: the time limit of the checkpoint service for an answer, in seconds.
        dying_s: the time limit of a killed service to die, in seconds.
    """

    def __init__(
        self,
        children: Children,
        saving: CheckpointClient,
        preparing: CompileClient,
        reporter: Reporter,
        saving_s: float,
        dying_s: float,
    ):
        self._children, self._saving, self._preparing, self._reporter = children, saving, preparing, reporter
        self._saving_s, self._dying_s = saving_s, dying_s
        self._killed: dict[Hashable, float] = {}  # the services that were killed and have not died, and when
        self.saved = 0  # the iteration that was saved last
        self.failure = ""  # the report on the last save that has failed

    def hear_keeper(self, line: str, membership: Membership) -> Event | None:
        """Takes an answer of the checkpoint service; returns the event that it means for the membership."""
        answer = self._saving.hear(line)
        match answer:
            case Saved(step, seconds, path, facts):
                self.saved = step
                self._reporter.note("checkpoint", step, None, path=path, save_ms=1000 * seconds, **facts)
                self._reporter.saved(step)
            case Kept(_, text):
                self.failure = text
            case Loaded() | Anew():
                return self._restored(answer, membership)
            case Failed("save", step, why, _):
                pause_s = self._saving.pause_s
                again = "" if pause_s is None else f"; trying again in {pause_s:.0f} s"
                text = self.failure = f"the checkpoint of iteration {step} was not saved: {why}{again}"
                self._reporter.note("checkpoint_failed", step or 0, text, error=why)
            case Failed("recut", step, why, generation):
                lost = f"the state after iteration {step} is lost: {why}"
                return RestoreFailed(generation, time.monotonic(), lost)
            case Failed(_, step, why, generation):
                which = "there is no checkpoint" if step is None else f"that of iteration {step} cannot be read"
                lost = f"the state is lost, and {which}"
                return RestoreFailed(generation, time.monotonic(), lost, why)
        return None

    def hear_preparer(self, line: str, when: float) -> None:
        """Takes a message of the compile service, received at this time."""
        said = self._preparing.hear(line, when)
        if said is None:
            return
        if isinstance(said, CompileFailed):
            self._reporter.note("prepare_failed", self._reporter.written, said.why, error=said.why)
        else:
            failed = [f"{pipeline}:{stage}" for pipeline, stage in sorted(said.failed)]
            ranks = {} if said.num_ranks is None else {"ranks": said.num_ranks}
            self._reporter.note("prepared", self._reporter.written, None, failed=failed, seconds=said.seconds, **ranks)

    def end_late(self, now: float) -> None:
        """Kills a service that is late, and gives up one that was killed and has not died."""
        if self._saving.end_if_late():
            why = f"did not answer for {self._saving_s:g} s"
            self._reporter.note("kill", self._reporter.written, f"the {KEEPER} {why}: killed", process=KEEPER, why=why)
            self._killed[KEEPER] = now
        if self._preparing.end_if_silent():
            why = "was not heard in time"
            self._reporter.note("kill", self._reporter.written, None, process=PREPARER, why=why)
            self._killed[PREPARER] = now
        for who in [who for who, at in self._killed.items() if now - at > self._dying_s]:
            self._children.abandon(who)
            self.died(who)

    def died(self, who: Hashable) -> None:
        """Has a service that has died started again; raises RunError where the run cannot do without it."""
        self._killed.pop(who, None)
        if who == KEEPER and not self._saving.died():
            raise RunError(f"the {KEEPER} dies again and again, see its log: stopped; {remedy(self._saving.newest)}")
        if who == PREPARER and not self._preparing.died():
            why = f"the {PREPARER} dies again and again, see its log: nothing is prepared any more"
            self._reporter.note("prepare_failed", self._reporter.written, why, error=why)

    def _restored(self, answer: Loaded | Anew, membership: Membership) -> Restored | None:
        stamp = answer.stamp
        if not membership.awaits_state(stamp.generation):
            return None
        if isinstance(answer, Loaded):
            event, text = "restore", f"all resume from the checkpoint of iteration {stamp.step}"
            self._reporter.saved(stamp.step)
        else:
            event = "recut"
            text = cut_text(answer.facts["ranks"], answer.facts["ranks_before"], stamp.step)
        self._reporter.note(event, stamp.step, "\n".join([text, *answer.lines]), epoch=stamp.generation, **answer.facts)
        return Restored(stamp, time.monotonic(), self._reporter.written)
