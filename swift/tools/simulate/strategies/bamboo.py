"""Bamboo (NSDI'23) by the throughputs and rules of Oobleck's artifact; the rules are those of Bamboo's simulator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from swift.tools.simulate.strategies.published import MOST_NODES, Published, throughput
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Turn

STAGES = 12
"""Of a pipeline."""
SLOWDOWN = 1.5
"""An iteration takes so much longer from a removal until stages are assigned anew."""
GLOBAL_RENDEZVOUS_S = 30.0
"""After a fatal removal."""
MOST_AT_RISK = 0.05
"""Of nodes whose loss would be fatal, twice those with two stages; with more, stages are assigned anew."""

_Place = tuple[int, int]


class _Assignment(NamedTuple):
    """Who runs what.

    Attributes:
        nodes: all that are there, in the order in which they came.
        place_of: the (pipeline, stage) of those that run.
        doubled: those that run their successor's stage as well.
        num_spare: as Bamboo counts them: it does not notice that a spare node goes.
        is_slow: somebody has gone since stages were assigned.
        num_assigned: how many nodes there were at that time, which the throughput goes by.
    """

    nodes: tuple[str, ...]
    place_of: Mapping[str, _Place]
    doubled: frozenset[str]
    num_spare: int
    is_slow: bool
    num_assigned: int


@dataclass(frozen=True)
class Bamboo:
    """Every node holds its successor's stage, too, and runs both when that one goes; nothing is lost.

    A removal is fatal, and costs a global rendezvous and the iteration under way, where the node has two stages or its
    shadow is gone. At the end of the iteration stages are assigned anew if there are as many spare nodes as doubled
    ones, if too many are at risk, or if another pipeline fits. That takes a local rendezvous.

    Attributes:
        model: whose published figures count; it must not run out of memory.
    """

    model: Published
    name = "bamboo"

    def __post_init__(self) -> None:
        assert self.model.bamboo is not None, "out of memory"

    @property
    def source(self) -> str:
        """Whose figures it follows."""
        return f"Oobleck's artifact: Bamboo's table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Of 30 nodes."""
        return self.model.samples / self._table[0]

    @property
    def samples(self) -> float:
        """Published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Assignment, Turn]:
        """With all nodes."""
        state = _assign(nodes)
        return state, Turn(self._pace(state))

    def change(self, state: _Assignment, moment: Moment) -> tuple[_Assignment, Turn | None]:
        """A removal is absorbed or fatal; then stages may be assigned anew."""
        after, is_fatal = state, False
        for node in moment.removed:
            after, fatal = _remove(after, node)
            is_fatal |= fatal
        after = after._replace(nodes=(*after.nodes, *moment.added), num_spare=after.num_spare + len(moment.added))
        local = Pause("reconfiguration", self.model.bamboo_rendezvous_s)
        if is_fatal or not moment.is_running:
            assigned = _assign(after.nodes)
            pace = self._pace(assigned)
            pause = Pause("reconfiguration", GLOBAL_RENDEZVOUS_S) if is_fatal else local
            return assigned, Turn(pace, "iteration", (pause,) if pace else ())
        # The iteration under way takes longer once, however many go.
        stretch = SLOWDOWN if moment.removed and not state.is_slow else 1.0
        if _is_reassigned(after):
            assigned = _assign(after.nodes)
            return assigned, Turn(self._pace(assigned), "nothing", (local,), stretch)
        if stretch == 1.0:
            return after, None
        return after, Turn(self._pace(after), "nothing", (), stretch)

    @property
    def _table(self) -> tuple[float, ...]:
        return self.model.bamboo or ()

    def _pace(self, state: _Assignment) -> Pace | None:
        rate = throughput(self._table, state.num_assigned)
        if not rate or not state.place_of:
            return None
        return Pace(self.model.samples / rate * (SLOWDOWN if state.is_slow else 1.0))


def _assign(nodes: tuple[str, ...]) -> _Assignment:
    """Whole pipelines, in the order of the nodes; the others are spare."""
    num_running = len(nodes) // STAGES * STAGES
    place_of = {node: divmod(index, STAGES) for index, node in enumerate(nodes[:num_running])}
    return _Assignment(nodes, place_of, frozenset(), len(nodes) - num_running, False, len(nodes))


def _remove(state: _Assignment, node: str) -> tuple[_Assignment, bool]:
    """The state without a node, and whether that is fatal."""
    left = state._replace(nodes=tuple(other for other in state.nodes if other != node), is_slow=True)
    if node not in state.place_of:
        return left, False
    place_of = {other: place for other, place in state.place_of.items() if other != node}
    left = left._replace(place_of=place_of, doubled=state.doubled - {node})
    pipeline, stage = state.place_of[node]
    shadows = [other for other, place in place_of.items() if place == (pipeline, (stage - 1) % STAGES)]
    if node in state.doubled or not shadows:
        return left, True
    return left._replace(doubled=left.doubled | {shadows[0]}), False


def _is_reassigned(state: _Assignment) -> bool:
    num_doubled, num_running = len(state.doubled), len(state.place_of)
    if num_doubled and (state.num_spare >= num_doubled or 2 * num_doubled > MOST_AT_RISK * num_running):
        return True
    return (num_running + state.num_spare) // STAGES > (num_running + num_doubled) // STAGES
