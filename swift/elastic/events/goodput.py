"""Where the time of a run goes: every moment of it is counted once, as use or as the cost of something.

No JAX here, and no clock: times are in seconds of any clock, and one that lies before the last is taken to be that.
"""

from collections import deque
from enum import StrEnum
from statistics import median

CAUSES = ("startup", "useful", "detection", "reconfiguration", "rerun", "waiting")
"""What time is spent on.

startup: until the first generation goes. useful: iterations, each of them once.
detection: a member is dead or stuck, and nobody knows.
reconfiguration: from then until the next generation goes, or from the last iteration before joiners are taken in; and
    what the first iteration of a generation takes longer than usual.
rerun: iterations that somebody had finished, run again; and what was begun of the iteration that a death broke off.
waiting: some stage has no process.
"""

_NUM_USUAL = 50
"""How many of the latest iterations, or windows of some, say what is usual."""


class _Phase(StrEnum):
    STARTING = "startup"
    RUNNING = "running"
    CHANGING = "reconfiguration"
    WAITING = "waiting"


class Goodput:
    """The time of a run so far, by cause.

    An iteration counts when the first member has finished it.

    Args:
        time: when the run begins.

    Attributes:
        newest: the newest iteration that anybody has ever finished.
        rerun_steps: how many iterations were run again.
    """

    def __init__(self, time: float):
        self._spent = dict.fromkeys(CAUSES, 0.0)
        self._mark, self._phase = time, _Phase.STARTING  # all before the mark is in ``_spent``
        self._usual_s = deque[float](maxlen=_NUM_USUAL)
        self._done: int | None = 0  # of this generation; None: not known yet where it has begun
        self._before = 0  # the newest of the generations before
        self._last: int | None = None  # after which this generation ends, since joiners wait
        self._is_first = False  # none of this generation, which is not the first one, is finished
        self._told = 0  # the newest that has a record though no member may have said that it has finished it
        self._broken_off_s = 0.0  # on the iteration that a death broke off, or so it seems
        self.newest = self.rerun_steps = 0

    def go(self, step: int | None, time: float) -> None:
        """A generation goes, after iteration ``step``; None: the first that is told to be finished says where."""
        self._close(time)
        self._spent["rerun"] += self._broken_off_s
        self._broken_off_s, self._last, self._told = 0.0, None, 0
        self._is_first = self._phase is not _Phase.STARTING
        self._phase, self._done, self._before = _Phase.RUNNING, step, self.newest

    def finish(self, step: int, time: float) -> None:
        """A member has finished an iteration of the generation that went last."""
        self.newest = max(self.newest, step)
        if self._done is None:
            self._done = step
        count = step - self._done
        if count <= 0:
            return
        again = max(0, min(step, self._before) - self._done)
        spent_s = self._spend_on(count, time) if self._phase is _Phase.RUNNING else self._broken_off_s
        self._spent["rerun"] += spent_s * again / count
        self._spent["useful"] += spent_s * (count - again) / count
        self.rerun_steps += again
        self._done, self._broken_off_s = step, 0.0
        if self._phase is _Phase.RUNNING and self._last is not None and step >= self._last:
            self._phase = _Phase.CHANGING

    def tell(self, step: int) -> None:
        """The record of an iteration has come; who finished it may die before it says so."""
        self._told = max(self._told, step)
        if self._phase is _Phase.CHANGING:
            self.finish(step, self._mark)

    def fail(self, failed: float, known: float, time: float) -> None:
        """A member of the generation cannot go on.

        Args:
            failed: since when.
            known: since when that is known.
            time: now.
        """
        assert self._phase in (_Phase.RUNNING, _Phase.CHANGING), "there is no generation, or it is no loss"
        time = max(time, self._mark)
        failed = min(max(failed, self._mark), time)
        known = min(max(known, failed), time)
        if self._phase is _Phase.RUNNING and not self._is_first:
            self._broken_off_s = failed - self._mark
        else:
            self._spent["reconfiguration"] += failed - self._mark
        self._spent["detection"] += known - failed
        self._spent["reconfiguration"] += time - known
        self._mark, self._phase = time, _Phase.CHANGING
        if self._told:
            self.finish(self._told, time)

    def form(self, after: int | None, time: float) -> None:
        """A generation is formed: at once, or when those who run have finished the iteration ``after``."""
        if self._phase is _Phase.RUNNING:
            self._last = after
            if after is None:
                self.fail(time, time, time)
        elif self._phase is _Phase.WAITING:
            self._close(time)
            self._phase = _Phase.CHANGING

    def wait(self, time: float) -> None:
        """There is no generation any more, for want of a stage."""
        if self._phase is not _Phase.STARTING:
            self._close(time)
            self._phase = _Phase.WAITING

    def seconds(self, time: float) -> dict[str, float]:
        """The time until now for each of ``CAUSES``, in seconds."""
        spent = dict(self._spent)
        spent["rerun"] += self._broken_off_s
        spent[self._cause_of_now()] += max(time - self._mark, 0.0)
        return spent

    def _close(self, time: float) -> None:
        """Between two generations, or before the first. Those who run a generation that ends do nothing more in it."""
        cause = "reconfiguration" if self._phase is _Phase.RUNNING else self._phase.value
        self._spent[cause] += max(time - self._mark, 0.0)
        self._mark = max(time, self._mark)

    def _spend_on(self, count: int, time: float) -> float:
        """The seconds of iterations that have just been finished, up to ``time``, but for what was not usual."""
        spent_s, self._mark = max(time - self._mark, 0.0), max(time, self._mark)
        if not self._is_first:
            self._usual_s.append(spent_s / count)
            return spent_s
        self._is_first = False
        usual_s = min(spent_s, count * median(self._usual_s)) if self._usual_s else spent_s
        self._spent["reconfiguration"] += spent_s - usual_s
        return usual_s

    def _cause_of_now(self) -> str:
        if self._phase is not _Phase.RUNNING:
            return self._phase.value
        if self._is_first:
            return "reconfiguration"
        return "rerun" if (self._done or 0) < self._before else "useful"
