"""Better cuts while workers are down: sought in the background of a run, and used once they pay for their move.

Right after a failure its micro-batches are re-routed, since that moves nothing. A better plan moves blocks twice: to
the survivors, and back once the worker returns.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from statistics import fmean

from swift.pipeline.reconfigure.engine import BetterCut, Engine, Reconfiguration
from swift.schedules.adapt import BANDWIDTH
from swift.topology import Worker

Failures = frozenset[Worker]


class Outages:
    """Times that workers stay away, as told by the user or learnt from those that have returned.

    Args:
        expected_s: expected time, in seconds; None: that of the outages seen so far, and endless before the first ends.
        clock: time in seconds.
    """

    def __init__(self, expected_s: float | None, clock: Callable[[], float] = time.monotonic):
        self._expected_s, self._clock = expected_s, clock
        self._down_since: dict[Worker, float] = {}
        self._seen_s: list[float] = []

    def follow(self, failed: Failures) -> None:
        """Notes the workers that are down from now on."""
        now = self._clock()
        for worker in self._down_since.keys() - failed:
            self._seen_s.append(now - self._down_since.pop(worker))
        for worker in failed - self._down_since.keys():
            self._down_since[worker] = now

    @property
    def expected_s(self) -> float:
        """Expected time until the next return; an outage that has lasted says nothing of what is left of it."""
        if self._expected_s is not None:
            return self._expected_s
        return fmean(self._seen_s) if self._seen_s else float("inf")


class CutSearch:
    """The search for a better cut for the present failures; a context manager, since it compiles in the background.

    Args:
        outages: how long workers stay away.
        always: whether a cut is used without regard to the time of its move.
        waits: whether ``ready`` waits for a search that is under way.
    """

    def __init__(self, outages: Outages, *, always: bool, waits: bool):
        self._outages, self._always, self._waits = outages, always, waits
        self._background = ThreadPoolExecutor(1, "better cut")
        self._found: Future[BetterCut | None] | None = None
        self._troubles: SimpleQueue[str] = SimpleQueue()
        self._bytes_per_s = BANDWIDTH

    def close(self, *, wait: bool = True) -> None:
        """Stops searching.

        Args:
            wait: whether to wait for a compilation that is running: XLA cannot be interrupted.
        """
        self._background.shutdown(wait=wait, cancel_futures=True)

    def begin(self, engine: Engine, failed: Failures) -> None:
        """Begins a search for these failures, and gives up the one before."""
        self._outages.follow(failed)
        if self._found is not None:
            self._found.cancel()
        self._found = self._background.submit(self._find, engine, failed) if failed else None

    def ready(self) -> BetterCut | None:
        """Returns a better cut, once, if it is compiled and its move pays before the expected return."""
        if self._found is None or not (self._waits or self._found.done()):
            return None
        better = self._found.result()
        if better is not None and not self._always and self.pays_after_s(better) >= self._outages.expected_s:
            return None  # what is expected may change
        self._found = None
        return better

    def troubles(self) -> list[str]:
        """Errors of searches since the last call."""
        return [self._troubles.get() for _ in range(self._troubles.qsize())]

    def pays_after_s(self, better: BetterCut) -> float:
        """Time after which moving blocks, and moving them back, has paid for itself."""
        return 2 * better.most_bytes / self._bytes_per_s / better.gain

    def moved(self, better: BetterCut, change: Reconfiguration) -> None:
        """Learns from a move how fast blocks are copied."""
        if change.move_ms > 0:
            self._bytes_per_s = better.most_bytes / (change.move_ms / 1000)

    def _find(self, engine: Engine, failed: Failures) -> BetterCut | None:
        try:
            return engine.better_cut(failed)
        except Exception as error:  # of any kind: the run continues re-routed
            down = ", ".join(f"{d}:{p}" for d, p in sorted(failed))
            self._troubles.put(f"with other cuts while {down} are down: {error}")
            return None
