"""Blocks that survivors of a failure take over: the cuts that were found and used, and whether a move pays."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swift.elastic.membership.events import CutFound
from swift.schedules.adapt.payoff import MoveRule
from swift.schedules.plans.holders import BlockHolders
from swift.topology import Worker


@dataclass(frozen=True)
class BlockMoves:
    """The moves of blocks in a run.

    Attributes:
        rule: whether a move pays; None: blocks stay.
        found: cut that is prepared and was not used yet; None: there is none.
        used: the one that was used last, for failures that have not changed since; it is used once.
        cuts: workers that hold each block, by number of the generation, for those that ran with another cut.
    """

    rule: MoveRule | None = None
    found: CutFound | None = None
    used: CutFound | None = None
    cuts: Mapping[int, BlockHolders] = field(default_factory=dict)

    def after_found(self, found: CutFound) -> "BlockMoves":
        """Returns the moves with a cut that is prepared; one that was used already is ignored."""
        is_used = self.used is not None and self.used.failed == found.failed
        return self if self.rule is None or is_used else replace(self, found=found)

    def better(self, failed: frozenset[Worker]) -> CutFound | None:
        """Returns the cut to use now that these workers are down; None if there is none, or its move does not pay."""
        found = self.found
        if self.rule is None or found is None or found.failed != failed:
            return None
        return found if self.rule.is_worth(found.gain, found.most_bytes) else None

    def after_form(self, number: int, failed: frozenset[Worker], time: float, better: CutFound | None) -> "BlockMoves":
        """Returns the moves once a generation is to form while these workers are down.

        Args:
            number: number of the generation.
            failed: workers that are down.
            time: present time, in seconds.
            better: cut that it is to use; None: that of the run.
        """
        if self.rule is None:
            return self
        rule = self.rule.after(failed, time)
        if better is not None:
            return replace(self, rule=rule, found=None, used=better, cuts={**self.cuts, number: better.cut})
        is_as_before = self.used is not None and self.used.failed == failed
        return replace(self, rule=rule, used=self.used if is_as_before else None)

    def after_refusal(self) -> "BlockMoves":
        """Returns the moves once a process cannot take part in one: there are no more, as it could not in others."""
        return replace(self, rule=None, found=None)

    def after_move(self, seconds: float) -> "BlockMoves":
        """Returns the moves once blocks have been moved, for which training has waited this long so far."""
        if self.rule is None or self.used is None:
            return self
        slower = self.rule.after_move(self.used.most_bytes, seconds)
        return replace(self, rule=slower)
