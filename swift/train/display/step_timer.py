"""The pace of a run: the time left, and the iterations for which a log has a line. No JAX here."""

from collections import deque

NUM_PLAIN_LINES = 10
NUM_TIMED_UPDATES = 50


class StepTimer:
    """Times of a run's latest iterations.

    Args:
        num_steps: last step of the run.
        log_every: iterations between two lines of a log; None: a line about every 10 % of the run.
    """

    def __init__(self, num_steps: int, log_every: int | None = None):
        self._num_steps, self._log_every, self._num_lines = num_steps, log_every, 0
        self._timed: deque[tuple[int, float]] = deque(maxlen=NUM_TIMED_UPDATES)

    def passed(self, step: int, time: float) -> bool:
        """Notes an iteration; returns whether the log has a line for it.

        Args:
            step: iterations done, from 1.
            time: time of its end in seconds, by any clock.
        """
        is_first = not self._timed
        self._timed.append((step, time))
        num_due = step * NUM_PLAIN_LINES // self._num_steps if self._log_every is None else step // self._log_every
        if is_first or step == self._num_steps or num_due > self._num_lines:
            self._num_lines = num_due
            return True
        return False

    def seconds_left(self, more_steps: int = 0) -> float | None:
        """Estimates the seconds that the remaining steps will take, from the latest ones; None if unknown.

        The first step, which compiles, does not count.

        Args:
            more_steps: steps of later runs.
        """
        if not self._timed:
            return None
        (first_step, start), (last_step, end) = self._timed[0], self._timed[-1]
        if last_step == first_step:
            return None
        return (end - start) / (last_step - first_step) * (self._num_steps - last_step + more_steps)

    def left(self) -> str:
        """Formats the time left; empty if unknown."""
        seconds = self.seconds_left()
        return "" if seconds is None else f"{format_duration(seconds)} left"


def format_duration(seconds: float) -> str:
    """Formats a duration as h:mm:ss, or m:ss under an hour."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"
