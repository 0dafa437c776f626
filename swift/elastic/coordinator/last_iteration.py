"""The last iteration of a run that is to stop: which it is, and what the run still waits for."""

import math
from collections import deque

from swift.elastic.membership import Membership
from swift.elastic.transport import Halt

_HEARING_S = 1.0
"""Time limit for all members to receive a command."""
_NUM_TIMED = 10
"""Iterations whose minimum is the duration to reckon with: a single one may have waited for something."""


class LastIteration:
    """Chooses the last iteration, once for every generation, so that all members can still stop after it."""

    def __init__(self) -> None:
        self._steps_s = deque([_HEARING_S], maxlen=_NUM_TIMED)  # of the newest iterations
        self._halted = self._last = 0  # the newest generation that was halted; its last iteration

    def record(self, step_s: float) -> None:
        """Notes how long an iteration took, in seconds."""
        self._steps_s.append(step_s)

    def halt(self, membership: Membership) -> Halt | None:
        """The command to the members of a generation that runs, where it was not given yet."""
        generation = membership.generation
        if (
            generation is None
            or generation.restoring
            or membership.is_recovering
            or self._halted == generation.form.number
        ):
            return None
        entered = max(status.entered for status in membership.members_of(generation))
        # So far ahead that nobody is beyond it on receipt: all have to finish the same iteration.
        self._last = entered + max(1, math.ceil(_HEARING_S / max(min(self._steps_s), 1e-3)))
        self._halted = generation.form.number
        return Halt(self._halted, self._last)

    def awaited(self, membership: Membership, written: int, saved: int, *, is_busy: bool) -> str:
        """Describes what a stopping run still waits for; empty once all that can be saved is saved.

        Args:
            membership: the present one.
            written: the last iteration whose record is written.
            saved: the iteration of the last checkpoint.
            is_busy: whether the checkpoint service has something to do.
        """
        is_saving = is_busy and not membership.is_loading
        if membership.is_done or (self._halted and is_saving):
            return "the checkpoint" if is_saving else ""
        is_lost = membership.generation is None and membership.policy.recovery == "live"
        if written <= saved or is_lost or membership.is_loading:
            return ""
        if self._halted == membership.went == membership.number:
            return f"iteration {self._last}, which is to be the last"
        return f"all processes to run after a failure; iteration {written} is not saved yet"
