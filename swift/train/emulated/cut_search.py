"""Better cuts while workers are down: sought in the background of a run, and used once they pay for their move.

Right after a failure its micro-batches are re-routed, since that moves nothing. A better plan moves blocks twice: to
the survivors, and back once the worker returns.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from swift.pipeline.reconfigure.engine import Engine, Reconfiguration
from swift.pipeline.reconfigure.recut import BetterCut
from swift.schedules.adapt.payoff import MoveRule
from swift.tasks import one_thread
from swift.topology import Worker

Failures = frozenset[Worker]


class CutSearch:
    """The search for a better cut for the present failures; a context manager, since it compiles in the background.

    Args:
        rule: whether a move pays.
        waits: whether ``ready`` waits for a search that is under way.
        clock: time in seconds.
    """

    def __init__(self, rule: MoveRule, *, waits: bool, clock: Callable[[], float] = time.monotonic):
        self._rule, self._waits, self._clock = rule, waits, clock
        self._background = one_thread("better cut")
        self._found: Future[BetterCut | None] | None = None
        self._troubles: SimpleQueue[str] = SimpleQueue()

    def close(self, *, wait: bool = True) -> None:
        """Stops searching.

        Args:
            wait: whether to wait for a compilation that is running: XLA cannot be interrupted.
        """
        self._background.shutdown(wait=wait, cancel_futures=True)

    def begin(self, engine: Engine, failed: Failures) -> None:
        """Begins a search for these failures, and gives up the one before."""
        self._rule = self._rule.after(failed, self._clock())
        if self._found is not None:
            self._found.cancel()
        self._found = self._background.submit(self._find, engine, failed) if failed else None

    def ready(self) -> BetterCut | None:
        """Returns a better cut, once, if it is compiled and its move pays before the expected return."""
        if self._found is None or not (self._waits or self._found.done()):
            return None
        better = self._found.result()
        if better is not None and not self._rule.is_worth(better.gain, better.most_bytes):
            return None
        self._found = None
        return better

    def troubles(self) -> list[str]:
        """Errors of searches since the last call."""
        return [self._troubles.get() for _ in range(self._troubles.qsize())]

    def moved(self, better: BetterCut, change: Reconfiguration) -> None:
        """Learns from a move how fast blocks are copied."""
        self._rule = self._rule.after_move(better.most_bytes, change.move_ms / 1000)

    def _find(self, engine: Engine, failed: Failures) -> BetterCut | None:
        try:
            return engine.better_cut(failed)
        except Exception as error:  # of any kind: the run continues re-routed
            down = ", ".join(f"{d}:{p}" for d, p in sorted(failed))
            self._troubles.put(f"with other cuts while {down} are down: {error}")
            return None
