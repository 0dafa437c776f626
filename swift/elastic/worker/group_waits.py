"""A worker's waits for the other members of its group, which end once another generation is to be formed at once."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swift.elastic.jax_group import JaxGroup
from swift.elastic.worker.worker_spec import STUCK


class GroupWaits:
    """The group of which this process is a member, and the time limit for its main thread to react to an abort.

    Args:
        keep: function that keeps the states of this process, called before it ends.

    Attributes:
        number: generation that the main thread forms or runs.
        group: group of that generation, or of the one before until the main thread has left it; None: there is none.
    """

    def __init__(self, keep: Callable[[], None]):
        self._keep = keep
        self._limit_s: float | None = None
        self.number = 0
        self.group: JaxGroup | None = None

    @contextmanager
    def abortable(self, limit_s: float) -> Iterator[None]:
        """Context of calls that no signal interrupts: once aborted they end in ``limit_s``, or the process does."""
        self._limit_s = limit_s
        try:
            yield
        finally:
            self._limit_s = None

    def aborter(self, number: int) -> Callable[[], None]:
        """Returns the function that aborts the collectives of generations before this one, see ``CommandListener``."""
        begun = time.monotonic()

        def abort() -> None:
            # Read anew each time, as the main thread may only now connect; and before the number, which is then its own
            # or a later one's.
            group, limit_s = self.group, self._limit_s
            if self.number >= number:
                return
            if group is not None:
                group.abort()
            if limit_s is not None and time.monotonic() - begun > limit_s:
                # A connection that broke during a send may never be reported (see JaxGroup.abort), and nothing
                # interrupts the creation of a backend. The next incarnation of this process finds the state.
                print(f"cannot be aborted for {limit_s:g} s: this process ends", file=sys.stderr, flush=True)
                self._keep()
                os._exit(STUCK)

        return abort
