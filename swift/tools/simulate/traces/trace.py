"""Failure traces: times at which nodes leave and join."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from swift.errors import check_number


class Event(NamedTuple):
    """Arrival or removal of a node.

    Attributes:
        time_s: time since the start of the trace.
        kind: ``add`` or ``remove``.
        node: name of the node. A name that returns is the same machine, repaired.
    """

    time_s: float
    kind: Literal["add", "remove"]
    node: str


class NodeChange(NamedTuple):
    """All events at one time.

    Attributes:
        time_s: time since the start of the trace.
        removed: present nodes that leave.
        added: nodes that join, or that leave and rejoin at the same time.
    """

    time_s: float
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """Events in order, and the end of the trace.

    Attributes:
        events: events by time; a node is removed only if present, and added only if absent.
        horizon_s: length of the trace; no event is later.

    Raises:
        SettingError: the trace has no length.
    """

    events: tuple[Event, ...]
    horizon_s: float

    def __post_init__(self) -> None:
        check_number("trace horizon (s)", self.horizon_s, above=0)
        assert all(0 <= event.time_s <= self.horizon_s for event in self.events), "an event outside the trace"

    @property
    def initial(self) -> tuple[str, ...]:
        """Nodes present at the start of the trace, in order."""
        first = next(self._all_changes(), None)
        return first.added if first is not None and first.time_s == 0 else ()

    @property
    def changes(self) -> Iterator[NodeChange]:
        """Changes after the start, by time."""
        return (change for change in self._all_changes() if change.time_s > 0)

    @property
    def num_failures(self) -> int:
        """Number of nodes that leave after the start."""
        return sum(len(change.removed) for change in self.changes)

    @property
    def most_nodes(self) -> int:
        """Largest number of nodes present at once."""
        num_nodes, most = len(self.initial), len(self.initial)
        for change in self.changes:
            num_nodes += len(change.added) - len(change.removed)
            most = max(most, num_nodes)
        return most

    @property
    def mean_time_between_failures_s(self) -> float:
        """Length of the trace divided by its failures; infinite without failures."""
        return self.horizon_s / self.num_failures if self.num_failures else float("inf")

    def _all_changes(self) -> Iterator[NodeChange]:
        live, position = set[str](), 0
        while position < len(self.events):
            time_s = self.events[position].time_s
            was_live, removed = dict[str, bool](), dict[str, None]()
            while position < len(self.events) and self.events[position].time_s == time_s:
                _, kind, node = self.events[position]
                assert (node in live) == (kind == "remove"), f"{kind} {node}"
                was_live.setdefault(node, node in live)
                if kind == "add":
                    live.add(node)
                else:
                    live.remove(node)
                    if was_live[node]:
                        removed[node] = None
                position += 1
            added = tuple(node for node, was in was_live.items() if node in live and (not was or node in removed))
            if removed or added:
                yield NodeChange(time_s, tuple(removed), added)
