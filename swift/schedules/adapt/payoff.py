"""Whether moving blocks pays: by what a move costs, what it gains, and how long workers are expected to stay away."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from swift.schedules.adapt.moving import BANDWIDTH
from swift.topology import Worker


@dataclass(frozen=True)
class Outages:
    """Times that workers stay away, as told by the user or learnt from those that have returned.

    Attributes:
        told_s: expected time, in seconds; None: that of the outages seen so far, and endless before the first ends.
        down_since: when each worker that is down failed, in seconds of any clock.
        seen_s: durations of the outages that are over, in seconds.
    """

    told_s: float | None = None
    down_since: Mapping[Worker, float] = field(default_factory=dict)
    seen_s: tuple[float, ...] = ()

    def after(self, failed: frozenset[Worker], time: float) -> "Outages":
        """Returns the outages with these workers down from now on."""
        ended = tuple(time - since for worker, since in self.down_since.items() if worker not in failed)
        down = {worker: self.down_since.get(worker, time) for worker in failed}
        return replace(self, down_since=down, seen_s=(*self.seen_s, *ended))

    @property
    def expected_s(self) -> float:
        """Expected time until the next return; an outage that has lasted says nothing of what is left of it."""
        if self.told_s is not None:
            return self.told_s
        return fmean(self.seen_s) if self.seen_s else float("inf")


@dataclass(frozen=True)
class MoveRule:
    """The rule by which a run moves blocks to the survivors of a failure; the worker's return moves them back.

    Attributes:
        outages: how long workers stay away.
        is_always: whether blocks are moved without regard to the time of the move.
        bytes_per_s: how fast the worker that gets the most bytes gets them, training waiting meanwhile.
    """

    outages: Outages = field(default_factory=Outages)
    is_always: bool = False
    bytes_per_s: float = BANDWIDTH

    def after(self, failed: frozenset[Worker], time: float) -> "MoveRule":
        """Returns the rule with these workers down from now on."""
        return replace(self, outages=self.outages.after(failed, time))

    def after_move(self, most_bytes: float, seconds: float) -> "MoveRule":
        """Returns the rule with the speed of a move that was made."""
        return replace(self, bytes_per_s=most_bytes / seconds) if seconds > 0 else self

    def pays_after_s(self, gain: float, most_bytes: float) -> float:
        """Time after which moving blocks, and moving them back, has paid for itself.

        Args:
            gain: share of a re-routed iteration's time that the move saves.
            most_bytes: bytes of state that the worker that gets the most of them has to copy.
        """
        return 2 * most_bytes / self.bytes_per_s / gain

    def is_worth(self, gain: float, most_bytes: float) -> bool:
        """Whether a move is to be made now; what is expected may change."""
        return self.is_always or self.pays_after_s(gain, most_bytes) < self.outages.expected_s
