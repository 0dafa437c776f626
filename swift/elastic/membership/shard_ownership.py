"""Ownership of the slices of states, in runs whose ranks may become fewer and more.

With one pipeline of one stage and a process for each expert rank nobody else has a rank's slices. Such a run is
elastic: the ranks that are present continue without those that are lost, from a state that is resharded for them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swift.elastic.membership.processes import Process, ShardLayout, Stamp

Found = frozenset[tuple[Process, Stamp]]
_WORTH = 2
"""Iterations worth running again to lose no slices: nobody has states of more than the last two."""


@dataclass(frozen=True)
class Slices:
    """The slices that exist of the states of an elastic run.

    Attributes:
        cuts: the layouts of all generations that were live, the newest last.
        held_by: the states of which each member of a generation has its slice.
        found: the slices, by process and state, that are known to be elsewhere.
    """

    cuts: Sequence[ShardLayout]
    held_by: Mapping[Process, frozenset[Stamp]]
    found: Found

    def cut_of(self, stamp: Stamp) -> ShardLayout | None:
        """The layout of a state; None for one that is not of this run."""
        return next((cut for cut in reversed(self.cuts) if stamp.generation in cut.generations), None)

    def missing(self, stamp: Stamp) -> tuple[Process, ...]:
        """The processes whose slices of a state do not exist."""
        cut = self.cut_of(stamp)
        assert cut is not None
        return tuple(one for one in cut.processes if not self._is_there(one, stamp))

    def agreed(self) -> Stamp | None:
        """The state to resume from: with all its slices, where that is not much older, or else with most of them.

        None where nobody has anything, and where something is lost of the state before the first iteration, which can
        as well be made again.
        """
        stamps = {stamp for held in self.held_by.values() for stamp in held if self.cut_of(stamp)}
        if not stamps:
            return None
        newest = max(stamps)
        recent = [stamp for stamp in stamps if stamp.step >= newest.step - _WORTH]
        whole = [stamp for stamp in recent if not self.missing(stamp)]
        if whole:
            return max(whole)
        of_newest = [stamp for stamp in recent if self.cut_of(stamp) == self.cut_of(newest)]
        fullest = max(of_newest, key=lambda stamp: (-len(self.missing(stamp)), stamp))
        return fullest if fullest.step else None

    def _is_there(self, process: Process, stamp: Stamp) -> bool:
        return stamp in self.held_by.get(process, ()) or (process, stamp) in self.found


def continued(
    cuts: Sequence[ShardLayout], cut: ShardLayout | None, number: int, members: Collection[Process]
) -> tuple[ShardLayout, ...]:
    """The layouts with that of a generation that goes live.

    Args:
        cuts: the layouts of the generations before.
        cut: the layout that it keeps; None: its state is new, or resharded for its members.
        number: the generation.
        members: its processes.

    >>> old = ShardLayout((Process((0, 0)), Process((0, 0), 1)), (1,))
    >>> [one.generations for one in continued([old], old, 2, old.processes)]
    [(1, 2)]
    >>> [one.generations for one in continued([old], None, 2, [Process((0, 0))])]
    [(1,), (2,)]
    """
    if cut is None:
        return (*cuts, ShardLayout(tuple(members), (number,)))
    return tuple(one._replace(generations=(*one.generations, number)) if one == cut else one for one in cuts)
