"""The last iteration of a run that is to stop: its choice, and what the stopping run still waits for."""

import math
from collections import deque

from swift.elastic.membership.state_machine import Membership
from swift.elastic.transport.worker_messages import Halt

_DELIVERY_S = 1.0
"""Time limit for all members to receive a command."""
_NUM_TIMED = 10
"""Number of iterations whose minimum counts as the duration of one: a single one may have waited for something."""


class LastIteration:
    """Chooses the last iteration, once for every generation, so that all members can still stop after it."""

    def __init__(self) -> None:
        self._steps_s = deque([_DELIVERY_S], maxlen=_NUM_TIMED)  # durations of the newest iterations
        self._halted = self._last = 0  # newest generation that was halted; its last iteration

    def record(self, step_s: float) -> None:
        """Records the duration of an iteration, in seconds."""
        self._steps_s.append(step_s)

    def halt(self, membership: Membership) -> Halt | None:
        """Returns the command to the members of a running generation, once for each generation."""
        generation = membership.generation
        if (
            generation is None
            or generation.restoring
            or membership.is_recovering
            or self._halted == generation.form.number
        ):
            return None
        entered = max(status.entered for status in membership.members_of(generation))
        # So far ahead that no member is beyond it on receipt: all have to finish the same iteration.
        self._last = entered + max(1, math.ceil(_DELIVERY_S / max(min(self._steps_s), 1e-3)))
        self._halted = generation.form.number
        return Halt(self._halted, self._last)

    def awaited(self, membership: Membership, written: int, saved: int, *, is_busy: bool) -> str:
        """Describes what a stopping run still waits for; empty once everything that can be saved is saved.

        Args:
            membership: present membership.
            written: last iteration whose record is written.
            saved: iteration of the last checkpoint.
            is_busy: whether the checkpoint service has something to do.
        """
        is_saving = is_busy and not membership.is_loading
        if membership.is_done or (self._halted and is_saving):
            return "the checkpoint" if is_saving else ""
        is_lost = membership.generation is None and membership.policy.recovery == "live"
        if written <= saved or is_lost or membership.is_loading:
            return ""
        if self._halted == membership.last_live == membership.number:
            return f"iteration {self._last}, which is to be the last"
        return f"all processes to run after a failure; iteration {written} is not saved yet"
