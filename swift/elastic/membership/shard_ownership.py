"""Ownership of the slices of states in elastic runs, whose number of ranks may change.

With one pipeline of one stage and a process for each expert rank, no other process has a rank's slices. Such a run is
elastic: the ranks that are present continue without lost ones, from a state that is resharded for them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swift.elastic.membership.commands import GoLive
from swift.elastic.membership.members import Member, Process, ShardLayout, Stamp

FoundSlices = frozenset[tuple[Process, Stamp]]
"""(owner, state) of slices that are kept elsewhere than by their owner."""
_MAX_RERUN = 2
"""Iterations worth running again to lose no slice: every process keeps the states of its last two only."""


@dataclass(frozen=True)
class Slices:
    """The slices that exist of the states of an elastic run.

    Attributes:
        layouts: layouts of all generations that were live, the newest last.
        held_by: states of which each member of a generation has its slice.
        found: slices known to be kept elsewhere than by their owner.
    """

    layouts: Sequence[ShardLayout]
    held_by: Mapping[Process, frozenset[Stamp]]
    found: FoundSlices

    def layout_of(self, stamp: Stamp) -> ShardLayout | None:
        """Returns the layout of a state; None for a state of another run."""
        return next((layout for layout in reversed(self.layouts) if stamp.generation in layout.generations), None)

    def missing(self, stamp: Stamp) -> tuple[Process, ...]:
        """Returns the processes whose slices of a state do not exist."""
        layout = self.layout_of(stamp)
        assert layout is not None
        return tuple(one for one in layout.processes if not self._exists(one, stamp))

    def agreed(self) -> Stamp | None:
        """Returns the state to resume from: a complete one if it is not much older, else the most complete.

        None if no process has any state, or if slices of the initial state are lost, which is cheaper to create again.
        """
        stamps = {stamp for held in self.held_by.values() for stamp in held if self.layout_of(stamp)}
        if not stamps:
            return None
        newest = max(stamps)
        recent = [stamp for stamp in stamps if stamp.step >= newest.step - _MAX_RERUN]
        whole = [stamp for stamp in recent if not self.missing(stamp)]
        if whole:
            return max(whole)
        of_newest = [stamp for stamp in recent if self.layout_of(stamp) == self.layout_of(newest)]
        fullest = max(of_newest, key=lambda stamp: (-len(self.missing(stamp)), stamp))
        return fullest if fullest.step else None

    def _exists(self, process: Process, stamp: Stamp) -> bool:
        return stamp in self.held_by.get(process, ()) or (process, stamp) in self.found


def extended_layouts(
    layouts: Sequence[ShardLayout], layout: ShardLayout | None, number: int, members: Collection[Process]
) -> tuple[ShardLayout, ...]:
    """Returns the layouts with that of a generation that goes live.

    Args:
        layouts: layouts of the generations before.
        layout: layout that the generation keeps; None: its state is new, or resharded for its members.
        number: number of the generation.
        members: its processes.

    >>> old = ShardLayout((Process((0, 0)), Process((0, 0), 1)), (1,))
    >>> [one.generations for one in extended_layouts([old], old, 2, old.processes)]
    [(1, 2)]
    >>> [one.generations for one in extended_layouts([old], None, 2, [Process((0, 0))])]
    [(1,), (2,)]
    """
    if layout is None:
        return (*layouts, ShardLayout(tuple(members), (number,)))
    return tuple(one._replace(generations=(*one.generations, number)) if one == layout else one for one in layouts)


def elastic_go_live(number: int, members: tuple[Member, ...], slices: Slices) -> tuple[GoLive, tuple[ShardLayout, ...]]:
    """Returns the command that makes a generation of an elastic run live, and the layouts of states from then on."""
    stamp, processes = slices.agreed(), tuple(member.process for member in members)
    if stamp is None:
        return GoLive(number, None), extended_layouts(slices.layouts, None, number, processes)
    layout = slices.layout_of(stamp)
    assert layout is not None
    holders = tuple(member for member in members if stamp in slices.held_by[member.process])
    is_same = layout.processes == processes and holders == members
    go = GoLive(number, stamp, holders, None if is_same else layout, not slices.missing(stamp))
    return go, extended_layouts(slices.layouts, layout if is_same else None, number, processes)
