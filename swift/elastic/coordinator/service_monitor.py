"""Monitoring of the checkpoint service and the compile service: their answers, time limits and deaths."""

import time
from collections.abc import Hashable

from swift.elastic.coordinator.checkpoint_client import CHECKPOINT_SERVICE
from swift.elastic.coordinator.compile_client import COMPILE_SERVICE
from swift.elastic.coordinator.run_spec import RunContext
from swift.elastic.membership.events import CutFound, Event, Restored, RestoreFailed
from swift.elastic.membership.state_machine import Membership
from swift.elastic.reporting.event_texts import reshard_text
from swift.elastic.transport.checkpoint_messages import CommandFailed, KeptElsewhere, Saved, StateRestored
from swift.elastic.transport.compile_messages import CompileFailed, CutPrepared
from swift.errors import RunError


class ServiceMonitor:
    """Takes the answers of the two services, and kills them if they are late.

    Args:
        context: objects of the run.

    Attributes:
        saved: iteration of the last checkpoint.
        failure: report on the last save that has failed.
    """

    def __init__(self, context: RunContext):
        self._context, self._reporter = context, context.reporter
        self._killed: dict[Hashable, float] = {}  # services that were killed and have not died, and when
        self.saved = 0
        self.failure = ""

    def take_checkpoint_answer(self, line: str, membership: Membership) -> Event | None:
        """Takes an answer of the checkpoint service; returns the event that it means for the membership, if any."""
        answer = self._context.checkpoints.take_answer(line)
        match answer:
            case Saved(step, seconds, path, facts):
                self.saved = step
                self._reporter.note("checkpoint", step, None, path=path, save_ms=1000 * seconds, **facts)
                self._reporter.saved(step)
            case KeptElsewhere(_, text):
                self.failure = text
            case StateRestored():
                return self._restored(answer, membership)
            case CommandFailed("save", step, why, _):
                pause_s = self._context.checkpoints.pause_s
                again = "" if pause_s is None else f"; trying again in {pause_s:.0f} s"
                text = self.failure = f"the checkpoint of iteration {step} was not saved: {why}{again}"
                self._reporter.note("checkpoint_failed", step or 0, text, error=why)
            case CommandFailed("reshard", step, why, generation):
                lost = f"the state after iteration {step} is lost: {why}"
                return RestoreFailed(generation, time.monotonic(), lost)
            case CommandFailed(_, step, why, generation):
                which = "there is no checkpoint" if step is None else f"that of iteration {step} cannot be read"
                lost = f"the state is lost, and {which}"
                return RestoreFailed(generation, time.monotonic(), lost, why)
        return None

    def take_compile_answer(self, line: str, time: float) -> CutFound | None:
        """Takes a message of the compile service, received at ``time``; returns the event that it means, if any."""
        answer, written = self._context.programs.take_answer(line, time), self._reporter.written
        if answer is None:
            return None
        if isinstance(answer, CompileFailed):
            self._reporter.note("prepare_failed", written, answer.why, error=answer.why)
            return None
        failed = [f"{pipeline}:{stage}" for pipeline, stage in sorted(answer.failed)]
        if isinstance(answer, CutPrepared):
            held = {"cuts": answer.cut.cuts, "places": answer.cut.places}
            more = held | {"microbatches": answer.microbatches, "gain": answer.gain}
            self._reporter.note("prepared", written, None, failed=failed, seconds=answer.seconds, **more)
            return CutFound(time, answer.failed, answer.cut, answer.gain, answer.most_bytes)
        ranks = {} if answer.num_ranks is None else {"ranks": answer.num_ranks}
        self._reporter.note("prepared", written, None, failed=failed, seconds=answer.seconds, **ranks)
        return None

    def kill_late(self, now: float) -> None:
        """Kills services that are late, and gives up those that were killed and have not died."""
        written, limits = self._reporter.written, self._context.spec.deadlines
        if self._context.checkpoints.kill_if_late():
            why = f"did not answer for {limits.saving:g} s"
            text = f"the checkpoint service {why}: killed"
            self._reporter.note("kill", written, text, process=CHECKPOINT_SERVICE, why=why)
            self._killed[CHECKPOINT_SERVICE] = now
        if self._context.programs.kill_if_silent():
            why = "sent no heartbeat in time"
            self._reporter.note("kill", written, None, process=COMPILE_SERVICE, why=why)
            self._killed[COMPILE_SERVICE] = now
        for service in [one for one, killed in self._killed.items() if now - killed > limits.dying]:
            self._context.children.abandon(service)
            self.died(service)

    def died(self, service: Hashable) -> None:
        """Restarts a service after its death; raises RunError if the run cannot continue without it."""
        self._killed.pop(service, None)
        if service == CHECKPOINT_SERVICE and not self._context.checkpoints.died():
            why = f"the checkpoint service has died too often, see {self._context.spec.log(CHECKPOINT_SERVICE)}"
            raise RunError(f"{why}: stopped; {self._context.remedy}")
        if service == COMPILE_SERVICE and not self._context.programs.died():
            log = self._context.spec.log(COMPILE_SERVICE)
            why = f"the compile service has died too often, see {log}: no more programs are prepared"
            self._reporter.note("prepare_failed", self._reporter.written, why, error=why)

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
        self._reporter.note(event, stamp.step, "\n".join([text, *answer.lines]), epoch=stamp.generation, **facts)
        return Restored(stamp, time.monotonic(), self._reporter.written)
