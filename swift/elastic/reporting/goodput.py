"""Goodput accounting: all time in a run is counted exactly once, as useful or by the cause of its loss.

There is no clock here: times are in seconds on any clock, and a time before the previous one counts as equal to it.
"""

from collections import deque
from enum import StrEnum
from statistics import median

CAUSES = ("startup", "useful", "detection", "reconfiguration", "rerun", "waiting")
"""Causes that the time of a run is attributed to.

startup: time until the first generation goes live.
useful: iterations, each counted once.
detection: a member is dead or stuck, but this has not been detected yet.
reconfiguration: from the detection, or from the last iteration before joiners are admitted, until the next generation
    goes live; and the additional duration of its first iteration.
rerun: iterations that are run again, and the time in an iteration that a death interrupted.
waiting: some stage has no process.
"""

_NUM_USUAL = 50
"""Number of recent windows whose median time per iteration counts as the usual duration."""


class _Phase(StrEnum):
    STARTING = "startup"
    RUNNING = "running"
    CHANGING = "reconfiguration"
    WAITING = "waiting"


class Goodput:
    """Accounts for the time of a run so far, by cause.

    An iteration counts as finished when the first member has finished it.

    Args:
        time: time at which the run begins, in seconds.

    Attributes:
        newest: newest iteration that any member has ever finished.
        rerun_steps: number of iterations that were run again.
    """

    def __init__(self, time: float):
        self._spent = dict.fromkeys(CAUSES, 0.0)
        self._mark, self._phase = time, _Phase.STARTING  # time before the mark is in ``_spent`` or ``_interrupted_s``
        self._usual_s = deque[float](maxlen=_NUM_USUAL)
        self._done: int | None = 0  # newest iteration of this generation; None: its start is not known yet
        self._before = 0  # newest iteration of all earlier generations; up to this one, iterations are reruns
        self._last: int | None = None  # iteration after which this generation ends to admit joiners
        self._is_first = False  # whether this is a later generation that has not finished an iteration yet
        self._recorded = 0  # newest iteration with a record; no member may have reported that it is finished
        self._interrupted_s = 0.0  # time spent on an iteration that a death seems to have interrupted
        self.newest = self.rerun_steps = 0

    @property
    def has_begun(self) -> bool:
        """Whether any iteration is finished, as reported by a member or by its record."""
        return max(self.newest, self._recorded) > 0

    def go_live(self, step: int | None, time: float) -> None:
        """Begins a live generation.

        Args:
            step: iteration after which the generation resumes; None if its first heartbeat will report it.
            time: time at which the generation goes live, in seconds.
        """
        self._close(time)
        self._spent["rerun"] += self._interrupted_s
        self._interrupted_s, self._last, self._recorded = 0.0, None, 0
        self._is_first = self._phase is not _Phase.STARTING
        self._phase, self._done, self._before = _Phase.RUNNING, step, self.newest

    def finish(self, step: int, time: float) -> None:
        """Counts the iterations up to ``step``, once a member of the newest live generation has finished them."""
        self.newest = max(self.newest, step)
        if self._done is None:
            self._done = step
        count = step - self._done
        if count <= 0:
            return
        again = max(0, min(step, self._before) - self._done)
        spent_s = self._spend_on(count, time) if self._phase is _Phase.RUNNING else self._interrupted_s
        self._spent["rerun"] += spent_s * again / count
        self._spent["useful"] += spent_s * (count - again) / count
        self.rerun_steps += again
        self._done, self._interrupted_s = step, 0.0
        if self._phase is _Phase.RUNNING and self._last is not None and step >= self._last:
            self._phase = _Phase.CHANGING

    def record(self, step: int) -> None:
        """Registers that an iteration has a record, as its member may die before reporting the end of the iteration."""
        self._recorded = max(self._recorded, step)
        if self._phase is _Phase.CHANGING:
            self.finish(step, self._mark)

    def fail(self, failed: float, known: float, time: float) -> None:
        """Ends the useful time of a generation because a member cannot continue.

        Args:
            failed: time of the failure, in seconds.
            known: time of its detection, in seconds.
            time: current time, in seconds.
        """
        assert self._phase in (_Phase.RUNNING, _Phase.CHANGING), "no generation is running or forming"
        time = max(time, self._mark)
        failed = min(max(failed, self._mark), time)
        known = min(max(known, failed), time)
        if self._phase is _Phase.RUNNING and not self._is_first:
            self._interrupted_s = failed - self._mark
        else:
            self._spent["reconfiguration"] += failed - self._mark
        self._spent["detection"] += known - failed
        self._spent["reconfiguration"] += time - known
        self._mark, self._phase = time, _Phase.CHANGING
        if self._recorded:
            self.finish(self._recorded, time)

    def form(self, after: int | None, time: float) -> None:
        """Begins a reconfiguration at once, or once the running generation has finished iteration ``after``."""
        if self._phase is _Phase.RUNNING:
            self._last = after
            if after is None:
                self.fail(time, time, time)
        elif self._phase is _Phase.WAITING:
            self._close(time)
            self._phase = _Phase.CHANGING

    def wait(self, time: float) -> None:
        """Ends the generation because a stage is lost; the time from now on counts as waiting."""
        if self._phase is not _Phase.STARTING:
            self._close(time)
            self._phase = _Phase.WAITING

    def seconds(self, time: float) -> dict[str, float]:
        """Returns the seconds spent until ``time``, for each of ``CAUSES``."""
        spent = dict(self._spent)
        spent["rerun"] += self._interrupted_s
        spent[self._cause_of_now()] += max(time - self._mark, 0.0)
        return spent

    def _close(self, time: float) -> None:
        """Counts the time since the mark, between two generations or before the first.

        If a generation was still running, the time counts as reconfiguration, since members of an ending generation do
        no useful work.
        """
        cause = "reconfiguration" if self._phase is _Phase.RUNNING else self._phase.value
        self._spent[cause] += max(time - self._mark, 0.0)
        self._mark = max(time, self._mark)

    def _spend_on(self, count: int, time: float) -> float:
        """Accounts for the time that newly finished iterations took, and returns their usual duration, in seconds.

        The first iterations of a later generation take longer than usual; the excess counts as reconfiguration.
        """
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
